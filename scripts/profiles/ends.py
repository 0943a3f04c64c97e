"""How a job with a live CUDA graph ends: HOW [sentinel], under torchrun; see scripts/gpu_profiles.py."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile import Sentinel, profiles
from tpcompile.collectives import all_reduce

faulthandler.dump_traceback_later(50)  # where it hangs, before the launcher's limit
WIDTH = 64


def layer(x_BD: Tensor) -> Tensor:
    return all_reduce(x_BD @ x_BD.new_ones(WIDTH, WIDTH), group=dist.group.WORLD)


def killed_in(when: str, compiled: profiles.Profiled) -> object:
    """The program, in which rank 1 is killed in a capture."""

    def program(x_BD: Tensor) -> Tensor:
        if when == "capture" and dist.get_rank() == 1 and torch.cuda.is_current_stream_capturing():
            os.kill(os.getpid(), signal.SIGKILL)
        return compiled(x_BD)

    return program


def main() -> None:
    how, *watched = sys.argv[1:]
    action, _, what = how.partition("-")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    compiled = torch.compile(layer, dynamic=False, fullgraph=True)
    is_other = rank == 1
    profile = "default" if how == "differs-profile" and is_other else "graphed"
    program = killed_in(what, compiled) if action == "killed" else compiled
    call = profiles.run(program, profile, is_compiled=True, name="layer", timeout_s=20.0)
    rows = 9 if how == "differs-signature" and is_other else 8
    with Sentinel() if watched else nullcontext(), torch.no_grad():
        for step in range(20):
            if how == "killed-replay" and is_other and step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            y = call(torch.full((rows, WIDTH), float(rank + step), device=device))
        torch.cuda.synchronize()
        wanted = WIDTH * sum(range(dist.get_world_size())) + WIDTH * 19 * dist.get_world_size()
        assert y.eq(wanted).all(), y
        print(f"rank {rank}: {call.num_captures} captures, {call.num_replays} replays", flush=True)
    if action == "close":
        call.close()
    if action in ("destroy", "close"):
        dist.destroy_process_group()
    print(f"rank {rank}: the last line", flush=True)


if __name__ == "__main__":
    main()
