"""What a task of srun knows of its place -> torchrun's variables; the environments are those of Slurm 22.05."""

from __future__ import annotations

import pytest

from tpcompile import launch
from tpcompile.srun import torchrun_variables

TASK = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1,1", "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}  # fmt: skip
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "6",
    "SLURM_TASKS_PER_NODE": "2(x2),1,1", "SLURM_JOB_NODELIST": "gpu[07-09,12]",
}  # fmt: skip


def test_a_task_gets_the_variables_of_torchrun() -> None:
    assert torchrun_variables(TASK) == {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "gpu07", "MASTER_PORT": "20703",
    }  # fmt: skip
    assert launch.is_rank(TASK)


def test_what_is_set_stays() -> None:
    """By the user's script, or by a torchrun on every node of the step."""
    own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert set(torchrun_variables({**TASK, **own})) == {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    of_torchrun = dict.fromkeys(torchrun_variables(TASK), "0")
    assert torchrun_variables({**TASK, **of_torchrun}) == {}


@pytest.mark.parametrize("environ", [{}, BATCH_SCRIPT, {**TASK, "SLURM_STEP_NUM_TASKS": "1"}])
def test_what_is_no_rank_of_a_step_gets_none(environ: dict[str, str]) -> None:
    """No Slurm; a batch script, which starts the steps; `srun --pty bash`."""
    assert torchrun_variables(environ) == {}
    assert not launch.is_rank(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("a,b", "a"),
        ("gpu[07-09,12],login", "gpu07"),
        ("r1n[3,5]", "r1n3"),
        ("x[1-2]y,z", "x1y"),
        ("r[1-2]n[01-04]", "r1n01"),
    ],
)
def test_the_first_node_serves_the_store(nodes: str, first: str) -> None:
    assert torchrun_variables({**TASK, "SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_steps_of_one_job_do_not_share_a_port() -> None:
    ports = {torchrun_variables({**TASK, "SLURM_STEP_ID": str(step)})["MASTER_PORT"] for step in range(20)}
    assert len(ports) == 20
