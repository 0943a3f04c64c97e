"""The context that a program gets, and the run of one case on this rank."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.faults.case import Planted
from tpcompile.sentinel import Sentinel


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where a program runs, and when its fault acts."""

    case: Planted
    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    mesh: DeviceMesh | None
    sentinel: Sentinel | None
    """None when the case runs without it."""
    num_steps: int
    run_dir: Path
    backend: str
    """Backend of programs in which the compiler is not the point; `aot_eager` compiles in a moment."""

    def faulty(self, step: int) -> bool:
        """True on the divergent ranks at the step of the fault; also records the time."""
        if step != self.case.step or not self.diverges:
            return False
        self.reached_fault()
        return True

    @property
    def diverges(self) -> bool:
        """True on the ranks the fault is planted on."""
        return self.rank in self.case.ranks

    def reached_fault(self) -> None:
        """Record the time right before the divergent statement, on the divergent ranks; later calls do nothing."""
        path = self.run_dir / f"reached_{self.rank}.json"
        if not path.exists():
            path.write_text(json.dumps(time.time()))

    def randn(self, *shape: int, **options: Any) -> torch.Tensor:
        """Random numbers on the device of this rank, equal on all ranks."""
        return torch.randn(*shape, device=self.device, **options)

    def run(self, block: Callable[[torch.Tensor], Any], *, backend: Any = None) -> None:
        """Compile a block and call it at every step, with a new batch of equal shape."""
        compiled = torch.compile(block, backend=backend or self.backend, dynamic=False)
        for step in range(self.num_steps):
            self.faulty(step)
            compiled(self.randn(8, 16))

    def watch(self, target: Any, **options: Any) -> Any:
        """`Sentinel.watch`, nothing when the case runs without a sentinel."""
        return target if self.sentinel is None else self.sentinel.watch(target, **options)


def join_group(rank: int, world_size: int) -> torch.device:
    """Join the default group, on a GPU for each rank where there are enough; the device of this rank."""
    is_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    if not is_cuda:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def play(case: Planted, *, rank: int, run_dir: Path, is_watched: bool, backend: str) -> None:
    """Run a case on this rank, with or without the sentinel."""
    device = join_group(rank, case.world_size)
    axes, sizes = zip(*case.mesh, strict=True) if case.mesh else ((), ())
    mesh = init_device_mesh(device.type, tuple(sizes), mesh_dim_names=tuple(axes)) if case.mesh else None
    torch.manual_seed(0)
    sentinel = Sentinel(mesh=mesh, run_dir=run_dir / "run", **case.options) if is_watched else None
    context = Context(
        case=case,
        rank=rank,
        world_size=case.world_size,
        device=device,
        group=mesh.get_group("tp") if mesh else dist.group.WORLD,
        mesh=mesh,
        sentinel=sentinel,
        num_steps=case.num_steps,
        run_dir=run_dir,
        backend=backend,
    )
    watching: AbstractContextManager[Any] = sentinel or nullcontext()
    with watching:
        case.program(context)
    dist.destroy_process_group()
