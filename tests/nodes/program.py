"""A job on several nodes, as a user has it: steps of a compiled layer with an all-reduce after each.

    program.py WHAT STEPS [FLAGS of Sentinel as NAME=NUMBER]

WHAT is what goes wrong: `nothing`, or `recompiles` (the last rank has a batch of its own at step 3).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist

WHAT, STEPS = sys.argv[1], int(sys.argv[2])
LIMITS = {name: float(value) for name, _, value in (flag.partition("=") for flag in sys.argv[3:])}


def main() -> None:
    """Train for some steps."""
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    layer = torch.compile(torch.nn.Linear(4, 4), backend="eager", dynamic=False)
    own: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if "TPCOMPILE_WATCH" not in os.environ:
        from tpcompile.sentinel import Sentinel

        own = Sentinel(run_dir="run", **LIMITS)
    with own:
        for step in range(STEPS):
            num_rows = 3 if WHAT == "recompiles" and rank == last and step == 3 else 2
            loss = layer(torch.ones(num_rows, 4)).sum()
            dist.all_reduce(loss.detach())
            print(f"rank {rank} step {step}", flush=True)
            time.sleep(0.05)
    print(f"rank {rank} is through", flush=True)


try:
    main()
finally:
    dist.destroy_process_group()
