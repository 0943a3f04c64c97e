"""A job of two ranks: values and bits, compiled graphs, training, groups; on GPUs each algorithm and CUDA graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.forked import PYTHONPATH, ROOT, torchrun

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
JOB = "tests/by_size/on_gpus.py"
PUSHED = {"pushed": 1, "pushed products": 1, "pushed in two groups": 2}
"""Check of the job -> groups that have memory for it on GPUs."""


@cache
def on_cpus() -> dict[str, Any]:
    with TemporaryDirectory() as name:
        ended = torchrun([ROOT / JOB, name])
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return alike(Path(name))


@cache
def on_gpus() -> dict[str, Any]:
    """torchrun is not forked here: the ranks use CUDA."""
    with TemporaryDirectory() as name:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", JOB, name]
        environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return alike(Path(name))


def alike(folder: Path) -> dict[str, Any]:
    """What the ranks have seen, which is the same on both."""
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    return dict(first)


def check_values(seen: dict[str, Any]) -> None:
    wrong = [name for name, is_right in seen["values"].items() if not is_right]
    assert wrong == [] and seen["in turns"]
    assert all(seen["graphed"]["right"]) and all(seen["graphed"]["same bits"])


def test_sums_are_right_and_have_the_same_bits_on_all_ranks() -> None:
    check_values(on_cpus())


def test_forward_and_backward_have_the_op_and_the_gradients_of_eager() -> None:
    seen = on_cpus()["trained"]
    assert seen == {"close": True, "ops": [1, 1], "alloc_id": False}


def test_each_group_sums_over_its_own_ranks() -> None:
    seen = on_cpus()["two groups"]
    assert (seen["right"], seen["apart"]) == (True, True)


@pytest.mark.gpu(2)
def test_on_gpus_every_algorithm_is_right_also_while_ranks_are_apart() -> None:
    check_values(on_gpus())
    assert not on_gpus()["multicast"]


@pytest.mark.gpu(2)
def test_on_gpus_replays_stay_right_when_the_workspace_grows_after_their_capture() -> None:
    seen = on_gpus()["graphed"]
    assert seen["captures"] == 2
    assert all(seen["right"])


@pytest.mark.parametrize("form", PUSHED)
def test_sums_in_flight_are_right(form: str) -> None:
    assert on_cpus()[form] == {"right": True, "calls": 3, "num_groups": 0}


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("form", "groups"), PUSHED.items())
def test_on_gpus_sums_in_flight_by_copy_engines_are_right_also_while_ranks_are_apart(form: str, groups: int) -> None:
    assert on_gpus()[form] == {"right": True, "calls": 300, "num_groups": groups}


@pytest.mark.gpu(2)
def test_on_gpus_forward_and_backward_share_no_allocation_of_inductor() -> None:
    assert on_gpus()["trained"] == {"close": True, "ops": [1, 1], "alloc_id": False}


@pytest.mark.gpu(2)
def test_on_gpus_each_group_has_memory_of_its_own() -> None:
    seen = on_gpus()["two groups"]
    assert (seen["right"], seen["apart"]) == (True, True)
    assert all(size > 0 for size in seen["bytes"])


@pytest.mark.gpu(2)
def test_on_gpus_a_workspace_that_would_grow_in_a_capture_is_refused() -> None:
    says = (
        "an all-reduce of 4096 bytes does not fit into the workspace of 0 bytes, which cannot grow while a CUDA graph"
    )
    assert on_gpus()["grown_in_capture"].startswith(says)
