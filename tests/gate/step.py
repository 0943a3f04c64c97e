"""Stands for srun: `step.py FLAGS` runs the gate as the two tasks of a job step, and prints how each ended."""

from __future__ import annotations

import os
import runpy
import sys
import time

from tests.faults.run import end_as_python
from tests.gate.runs import REPRO

_STORE_GONE_S = 1.0
"""The store ends within a look at what the tasks have published."""


def main() -> None:
    """Start both tasks, wait for both."""
    tasks = [_start(rank) for rank in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(task, 0)[1]) for task in tasks]
    time.sleep(_STORE_GONE_S)
    print(f"tasks ended with {codes}")


def _start(rank: int) -> int:
    task = os.fork()
    if task == 0:
        os.environ |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        sys.argv[0] = str(REPRO)
        end_as_python(lambda: runpy.run_path(str(REPRO), run_name="__main__"))
    return task


if __name__ == "__main__":
    main()
