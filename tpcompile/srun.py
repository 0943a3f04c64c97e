"""srun's environment variables -> those that torchrun would set, for a job step whose tasks are the ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PORTS = range(20_000, 30_000)
"""Below the ports that Linux hands out by itself (32768 and up)."""


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set in this task and is not set yet; empty outside a step of several tasks.

    The first node of the step serves the store, at a port made from the numbers of job and step; MASTER_ADDR and
    MASTER_PORT of the user's own go first. A batch script and `srun --pty bash` are no ranks.
    Source: slurm.schedmd.com/srun.html, "Output environment variables".
    """
    names = {
        "RANK": "SLURM_PROCID",
        "LOCAL_RANK": "SLURM_LOCALID",
        "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    }
    needed = {*names.values(), "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_STEP_ID"}
    if not needed.issubset(environ) or environ["SLURM_STEP_NUM_TASKS"] == "1":
        return {}
    tasks = _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    node = int(environ["SLURM_NODEID"])
    step = 100 * int(environ.get("SLURM_JOB_ID", "0")) + int(environ["SLURM_STEP_ID"])
    # The first node of a list: `gpu[07-09,12],login` is gpu07.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", environ["SLURM_STEP_NODELIST"])
    assert first is not None, "the expression matches any text"
    found = {name: environ[ours] for name, ours in names.items()} | {
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "MASTER_ADDR": re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]),
        "MASTER_PORT": str(_PORTS[step % len(_PORTS)]),
    }
    return {name: value for name, value in found.items() if name not in environ}


def _tasks_per_node(text: str) -> list[int]:
    """Tasks of every node: `2(x3),1` is [2, 2, 2, 1]."""
    tasks = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(times or 1)
    return tasks
