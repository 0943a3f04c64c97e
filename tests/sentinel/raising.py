"""Rank 1 raises while rank 0 waits in a collective; started by test_exceptions under torchrun."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tpcompile.ranks import run_dir
from tpcompile.sentinel import Sentinel, shutdown

FORM, *RUN_DIR = sys.argv[1:]
if RUN_DIR[1:]:  # of two jobs that look at the same moment, both find the folder free
    run_dir.free_number = lambda path: 1
if FORM == "cleanup":  # takes longer than the peers stay; torchrun dates failures by the second
    shutdown._PEERS_STAY_S = 2.0


def backend(graph: Any, inputs: Any) -> Any:
    if FORM == "compile" and dist.get_rank() == 1 and inputs[0].shape == (4,):
        raise ImportError("planted in the backend")
    return graph


@torch.compile(backend=backend, dynamic=False)
def step(x: Tensor) -> Tensor:
    return funcol.all_reduce(x * 2, "sum", dist.group.WORLD)


def main() -> None:
    with Sentinel(run_dir=RUN_DIR[0] if RUN_DIR else None):
        for number in range(6):
            step(torch.ones(3))
            if FORM != "compile" and dist.get_rank() == 1 and number == 3:
                raise ValueError("planted in the loop")
        step(torch.ones(4))


dist.init_process_group("gloo")
try:
    main()
finally:
    if FORM == "cleanup":
        threading.Event().wait(60 if dist.get_rank() == 1 else 0.0)
