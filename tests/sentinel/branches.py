"""Two ranks train until one takes a different branch: `branches.py FORM`; see test_executed.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpcompile import Sentinel

FORM = sys.argv[1]


class Optimizer:
    """Sums its weights every third of its own steps."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.num_steps = weight, 0

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            dist.all_reduce(self.weight)


def must_skip(step: int) -> bool:
    """True where the gradients of this rank have overflowed; by the advice, where those of any rank have."""
    skips = torch.tensor(
        float(FORM in ("skips", "agrees", "off", "killed skipping") and dist.get_rank() == 1 and step == 5)
    )
    if FORM == "agrees":
        dist.all_reduce(skips, op=dist.ReduceOp.MAX)
    return bool(skips)


def gathered(step: int) -> None:
    rows = 4 if FORM == "aborts" and dist.get_rank() == 1 and step == 5 else 2
    if rows == 2:
        dist.all_reduce(torch.ones(2, 8))
    else:
        dist.all_reduce(torch.ones(4096, 8))


def kill() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


REACHED = threading.Event()
"""A rank is in the step in which the others go a different way."""


def kill_all(pids: list[int], *, after_s: float) -> None:
    """End all ranks at once, as the kernel does where the memory of a container is used up: none can say why."""
    REACHED.wait()
    time.sleep(after_s)
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


def before_all_are_killed(step: int) -> None:
    """One of the forms in which all ranks are killed: one hangs, or has skipped something, or nothing is wrong."""
    if step == 5:
        REACHED.set()
    if FORM == "killed hanging" and dist.get_rank() == 1 and step == 5:
        time.sleep(60)
    time.sleep(0.5)


class Settings:
    """Read before the block; those of one host are not up to date."""

    def __init__(self) -> None:
        is_old = FORM == "setting" and dist.get_rank() == 1
        self.scale = 2.0 if is_old else 1.0


@torch.compile(backend="eager")
def forward(x: torch.Tensor, settings: Settings) -> torch.Tensor:
    return x.sin() * settings.scale


def main() -> None:
    dist.init_process_group("gloo")
    optimizer, settings = Optimizer(torch.ones(24)), Settings()
    domains: dict[str, Any] = {}
    if FORM == "domains":  # data parallel: each rank is a domain of its own
        domains = {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), "axis": "tp"}
    if FORM.startswith("killed "):
        pids: list[Any] = [None, None]
        dist.all_gather_object(pids, os.getpid())
        wait = {"after_s": 4.0 if FORM == "killed hanging" else 0.8}
        threading.Thread(target=kill_all, args=(pids,), kwargs=wait, daemon=True).start()
    flow = {"off": False, "setting": None}.get(FORM, True)
    with Sentinel(flow=flow, hang_after_s=1.0, **domains):
        if FORM == "killed":
            threading.Timer(1.0, kill).start()
        for step in range(10):
            loss = forward(torch.ones(4), settings)
            if FORM == "killed":
                time.sleep(0.3)
            if FORM == "domains" and dist.get_rank() == 1 and step == 5:
                continue
            if FORM.startswith("killed "):
                before_all_are_killed(step)
            gathered(step)
            if not must_skip(step):
                optimizer.step()
            if dist.get_rank() == 0:
                print(step, float(loss.sum()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
