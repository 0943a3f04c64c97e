"""A plain program of two ranks that has never heard of tpcompile; its argument says what goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

WHAT = sys.argv[1]


def kill_all(pids: list[int]) -> None:
    """End the other rank, and then this one, before either can say anything."""
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Train for some steps."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layer = torch.compile(torch.nn.Linear(4, 4), backend="eager")
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    own = contextlib.nullcontext()
    if WHAT == "own sentinel":
        from tpcompile import Sentinel

        own = Sentinel(run_dir=os.environ["OWN_RUN_DIR"])
    with own:
        for step in range(6):
            num_rows = 3 if WHAT == "recompiles" and rank == 1 and step == 3 else 2
            if WHAT == "recompiles last" and step == 5:
                layer(torch.ones(3 if rank == 1 else 2, 4))
                break
            loss = layer(torch.ones(num_rows, 4)).sum()
            if WHAT == "leaves early" and rank == 1 and step == 3:
                break
            if WHAT == "raises" and rank == 0 and step == 3:
                raise ValueError("a bad batch")
            if WHAT == "hangs" and step == 3:
                os.kill(int(os.environ["LAUNCHER"]), signal.SIGINT)
                time.sleep(600)
            if WHAT == "one hangs" and rank == 1 and step == 3:
                threading.Timer(7.0, os.kill, (int(os.environ["LAUNCHER"]), signal.SIGINT)).start()
                time.sleep(600)  # another process holds the lock
            if WHAT == "all are killed" and rank == 1 and step == 3:
                threading.Timer(5.0, kill_all, (pids,)).start()
                time.sleep(600)  # nobody will say so
            dist.all_reduce(loss.detach())
    print("the program's own output", flush=True)


try:
    main()
finally:
    dist.destroy_process_group()
