"""What a pod of Kubeflow knows of its place -> torchrun's variables, or one line that says what to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpcompile import launch
from tpcompile.errors import ConfigError
from tpcompile.pods import torchrun_variables
from tpcompile.request import GateRequest

POD = {
    "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": "3",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}  # fmt: skip
"""Of a PyTorchJob."""


@pytest.mark.parametrize("newer", [{}, {"PET_NPROC_PER_NODE": "auto"}, {"PET_NPROC_PER_NODE": "1"}])
def test_a_pod_with_one_rank_gets_the_place_on_its_node(newer: dict[str, str]) -> None:
    assert torchrun_variables({**POD, **newer}) == {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize("left_out", ["KUBERNETES_SERVICE_HOST", "RANK", "MASTER_ADDR"])
def test_what_is_no_rank_of_a_pod_gets_none(left_out: str) -> None:
    """mpirun on a node, where processes share the GPUs; a pod of one rank."""
    assert torchrun_variables({name: value for name, value in POD.items() if name != left_out}) == {}


def test_what_torchrun_has_set_stays() -> None:
    assert torchrun_variables({**POD, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == {}


def test_a_pod_for_several_ranks_is_told_to_start_them() -> None:
    with pytest.raises(ConfigError, match=r"PET_NPROC_PER_NODE=8 .*torchrun -m tpcompile gate"):
        torchrun_variables({**POD, "PET_NPROC_PER_NODE": "8"})


def test_a_launcher_in_a_pod_of_several_does_not_wait_for_the_others(tmp_path: Path) -> None:
    """torchrun takes PET_NNODES as the default of its own flag, with --standalone as well."""
    of_trainer = {"PATH": "/usr/bin", "PET_NNODES": "2", "PET_NODE_RANK": "1", "CXX": "sh"}
    with pytest.raises(ConfigError, match=r"PET_NNODES=2: .*--nproc"):
        launch.plan(GateRequest(device="cpu", run_dir=tmp_path / "none"), of_trainer)
    planned = launch.plan(GateRequest(device="cpu", nproc=2, run_dir=tmp_path / "run"), of_trainer)
    assert not [name for name in planned.environ if name.startswith("PET_")]


def test_a_rank_outside_of_a_pod_is_told_which_variables_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpcompile.ranks.env import rank_env

    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK and LOCAL_WORLD_SIZE .*rank 3; set 0 and 1 "):
        rank_env()
