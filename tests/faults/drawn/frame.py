"""The environment of a rank -> Job: the groups, the device and the way in which the program is watched."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.faults.names import CHECKED, REACHED, RUN, Route
from tpcompile import checking
from tpcompile.sentinel import Sentinel

_CHECK_TIMEOUT_S = 20.0
_TP_AWARE = ("transformers::grouped_mm_fallback",)
"""Custom ops of the programs that are right on a shard: transformers runs it over the experts that a rank has."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a program is given."""

    rank: int
    mesh: DeviceMesh
    """Always with the axis `tp`."""
    group: dist.ProcessGroup
    """The tensor-parallel group of this rank."""
    tp: int
    device: torch.device
    backend: str
    num_steps: int
    route: Route
    out: Path
    options: dict[str, Any]
    """Options of the sentinel."""

    def watching(self) -> AbstractContextManager[Any]:
        """What the program's steps run under."""
        if self.route == Route.SENTINEL:
            return Sentinel(mesh=self.mesh, axis="tp", run_dir=self.out / RUN, **self.options)
        return self._captured() if self.route == Route.CHECK_RANKS else nullcontext()

    @contextmanager
    def _captured(self) -> Iterator[None]:
        with checking.capture(self.mesh, watch=False, tp_aware=_TP_AWARE) as run, run.phase("steps"):
            yield
        verdict = checking.check(run, timeout_s=_CHECK_TIMEOUT_S)
        if self.rank == 0:
            (self.out / CHECKED).write_text(verdict.model_dump_json())

    def acts(self) -> None:
        """Write the time at which the fault first acts on this rank."""
        path = self.out / REACHED.format(rank=self.rank)
        if not path.exists():
            path.write_text(json.dumps(time.time()))


def world_size() -> int:
    """Ranks of this job."""
    return int(os.environ["WORLD_SIZE"])


def start(*, dp: int = 1, pp: int = 1) -> Job:
    """Join the group; what dp and pp leave of the ranks is the axis `tp`. Every rank draws the same numbers."""
    settings = json.loads(os.environ["GENERATED_SETTINGS"])
    rank, tp = int(os.environ["RANK"]), world_size() // (dp * pp)
    is_cuda = settings["device"] == "cuda"
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
    mesh = init_device_mesh(device.type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(0)
    return Job(
        rank=rank,
        mesh=mesh,
        group=mesh.get_group("tp"),
        tp=tp,
        device=device,
        backend=settings["backend"],
        num_steps=settings["num_steps"],
        route=Route(settings["route"]),
        out=Path(settings["out"]),
        options=settings["options"],
    )


def twin_of_tp(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A second group with the same ranks as this rank's group `tp`; all ranks call it."""
    size = mesh["tp"].size()
    mine = None
    for first in range(0, world_size(), size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= dist.get_rank() < first + size:
            mine = group
    assert mine is not None, "tp is the innermost axis"
    return mine


def other_dtype(x: torch.Tensor) -> torch.dtype:
    """A dtype that a model takes instead of that of x."""
    return torch.float64 if x.is_floating_point() else torch.int32


def flip_grad_mode() -> None:
    """Gradients where there were none, and none where there were."""
    torch.set_grad_enabled(not torch.is_grad_enabled())


def local_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters as this rank holds them."""
    return {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in model.named_parameters()}
