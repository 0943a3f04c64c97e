"""Rank 1 writes to the job's store what only other ranks should act on; started by test_forged under torchrun.

forging.py dies|differs FILE_OF_A_VICTIM FOREIGN_FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tpcompile.ranks.liveness import this_host
from tpcompile.sentinel import Sentinel

HOW, VICTIM, FOREIGN = sys.argv[1:]


def forge() -> None:
    """As a client of its own, which any process that reaches the store can be."""
    client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    shared = dist.PrefixStore("tpcompile/sentinel", client)
    here = {"pid": os.getpid(), "host": this_host(), "black_box": VICTIM, "main_thread": 1}
    dist.PrefixStore("waiting/0", shared).set("here/1", json.dumps(here))
    dist.PrefixStore("world 0-1/0", shared).set("run_dir", json.dumps(FOREIGN))


def main() -> None:
    factor = dist.get_rank() + 1 if HOW == "differs" else 2

    @torch.compile(backend="eager", dynamic=False)
    def step(x: Tensor) -> Tensor:
        return funcol.all_reduce(x * factor, "sum", dist.group.WORLD)

    with Sentinel(hang_after_s=0.5, unresponsive_s=2.0):
        if dist.get_rank() == 1:
            forge()
        dist.barrier()
        for number in range(6):
            step(torch.ones(3))
            if HOW == "dies" and dist.get_rank() == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("gloo")
main()
