"""The program of a page on one rank of a job, watched as under `tpcompile run`, and recorded line by line if asked for.

torchrun --nproc-per-node 2 tests/advice/watched.py PROGRAM RUN_DIR FLOW
"""

from __future__ import annotations

import functools
import os
import runpy
import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.advice.played import BACKEND
from tpcompile.autostart.groups import watch
from tpcompile.watched import SETTINGS, WATCH, Settings


def main() -> None:
    """Run the program in this process."""
    program, run_dir, flow = sys.argv[1:]
    os.environ |= {WATCH: "1", SETTINGS: Settings(run_dir=run_dir, flow=flow == "flow").model_dump_json()}
    watch(distributed_c10d)
    dist.init_process_group = distributed_c10d.init_process_group  # imported before it was watched
    dist.destroy_process_group = distributed_c10d.destroy_process_group
    torch.compile = functools.partial(torch.compile, backend=BACKEND)  # type: ignore[misc]
    try:
        runpy.run_path(program, run_name="__main__")
    except Exception as error:  # a forked process has no interpreter of its own that would call the hook
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


main()
