"""Programs the capture tests run on two gloo ranks; each returns this rank's record."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._inductor.utils import clear_caches
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tpcompile.evidence.records import RankRecord
from tpcompile.ranks.domain import mesh_roles
from tpcompile.recording import CaptureSession


class Language(nn.Module):
    """Embedding and a two-layer MLP: the parts of a language model that DTensor shards."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [2, 5] -> hidden [2, 5, 16]."""
        h = self.embedding(tokens)
        return h + self.down(torch.relu(self.up(h)))


PLAN = {"embedding": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()}
PHASES = ("cold", "warm", "split")


def cold_warm_split(folder: str) -> RankRecord:
    """Compile forward and backward with cold caches, warm ones, and warm on rank 0 but cold on rank 1.

    The model is DTensor's: vocabulary-sharded embedding, column and row linear.
    """
    rank = dist.get_rank()
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.cpp.simdlen = 1  # half the time in the C++ compiler
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model, tokens = parallelize_module(Language(), mesh, PLAN), torch.arange(10).view(2, 5) * 6
    with CaptureSession(groups=mesh_roles(mesh)) as session:
        for phase in PHASES:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache(phase, rank, Path(folder))
            clear_caches()
            session.reset_compiler()
            with session.phase(phase):
                torch.compile(model, fullgraph=True)(tokens).sum().backward()
    return session.record(rank=rank, world_size=2)


def _cache(phase: str, rank: int, folder: Path) -> str:
    """Inductor cache of a phase. The cold half of a split keeps its compiled C++, to save time: graphs are cold."""
    own = folder / str(rank)
    if (phase, rank) != ("split", 1):
        return str(own)
    return str(shutil.copytree(own, folder / "split", ignore=shutil.ignore_patterns("fxgraph", "aotautograd")))


class Scaled(nn.Module):
    """A program with one thing that may differ between ranks."""

    def __init__(self, *, flag: bool = True, scale: int = 1, op: str = "sum", use_rank: bool = False) -> None:
        super().__init__()
        self.flag, self.scale, self.op, self.use_rank = flag, scale, op, use_rank
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """[4, 8] -> [4, 8], reduced over all ranks."""
        y = x * self.weight
        if self.flag:  # guarded, and without any effect on the graph
            pass
        y = y * self.scale
        if self.use_rank:
            y = y * (dist.get_rank() + 1)
        return funcol.all_reduce(y, self.op, dist.group.WORLD) + 1


def double(x: Tensor) -> Tensor:
    """One of two small programs without collectives."""
    return x * 2 + 1


def cosine(x: Tensor) -> Tensor:
    """The other one."""
    return x.cos() - 1


def _run(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    y = torch.compile(model, backend="aot_eager")(x)
    if y.requires_grad:
        y.sum().backward()


def _healthy(rank: int) -> None:
    _run(Scaled(), torch.ones(4, 8))


def _flag(rank: int) -> None:
    _run(Scaled(flag=rank == 0), torch.ones(4, 8))


def _attribute(rank: int) -> None:
    _run(Scaled(scale=rank + 3), torch.ones(4, 8))


def _get_rank(rank: int) -> None:
    _run(Scaled(use_rank=True), torch.ones(4, 8))


def _reduce_op(rank: int) -> None:
    _run(Scaled(op="sum" if rank == 0 else "max").requires_grad_(False), torch.ones(4, 8))  # max has no backward


def _stride(rank: int) -> None:
    _run(Scaled(), torch.ones(4, 8) if rank == 0 else torch.ones(8, 4).t())


def _extra(rank: int) -> None:
    _run(Scaled(), torch.ones(4, 8))
    if rank == 1:
        _run(double, torch.ones(3))


def _opposite_order(rank: int) -> None:
    for program in (double, cosine) if rank == 0 else (cosine, double):
        _run(program, torch.ones(3))


_ALL = (_healthy, _flag, _attribute, _get_rank, _reduce_op, _stride, _extra, _opposite_order)
CONTROLS = {control.__name__[1:]: control for control in _ALL}


def controls() -> dict[str, RankRecord]:
    """Every control on its own, compiled from scratch."""
    rank, found = dist.get_rank(), {}
    for name, control in CONTROLS.items():
        torch.compiler.reset()
        torch.manual_seed(0)
        with CaptureSession(groups={dist.group.WORLD.group_name: "tp"}) as session, session.phase("first"):
            control(rank)
        found[name] = session.record(rank=rank, world_size=2)
    return found
