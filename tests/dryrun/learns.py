"""Ways in which a program learns its rank, each with a difference on one rank in the middle."""

from __future__ import annotations

import ctypes
import dataclasses
import operator
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tpcompile
from tpcompile.target import TargetContext

Rank = Callable[[TargetContext], Any]
"""Says a number, or a text, in which the rank is."""


def _in_a_thread(ctx: TargetContext) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(dist.get_rank()))
    thread.start()
    thread.join()
    return found[0]


def _under_a_profiler(ctx: TargetContext) -> int:
    import cProfile

    with cProfile.Profile():
        return dist.get_rank()


def _of_own_groups(ctx: TargetContext) -> int:
    """Which of the groups of one rank each it is in."""
    groups = [dist.new_group([rank]) for rank in range(ctx.world_size)]
    mine = [rank for rank, group in enumerate(groups) if group is not dist.GroupMember.NON_GROUP_MEMBER]
    return mine[0]


def _of_a_shard(ctx: TargetContext) -> int:
    """The last has fewer rows: 3 and 3 and 1, or 3 and 3 and 3 and 2."""
    rows = ctx.mesh["dp"]
    return distribute_tensor(torch.zeros(4 * rows.size() - 5, 8), rows, [Shard(0)]).to_local().shape[0]


def _offset(ctx: TargetContext) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset((4, ctx.world_size), ctx.mesh, [Shard(0), Shard(1)])
    return offset


def _sampler(ctx: TargetContext) -> int:
    from torch.utils.data import DistributedSampler

    return DistributedSampler(range(64)).rank


def _of_c(ctx: TargetContext) -> str:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return getenv(b"RANK").decode()


def _of_a_process(ctx: TargetContext) -> str:
    code = "import os; print(os.environ['RANK'])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _of_its_log(ctx: TargetContext) -> str:
    return str(Path("/proc/self/fdinfo/1").read_text() and os.readlink("/proc/self/fd/1"))


def _backend(ctx: TargetContext) -> int:
    group = dist.group.WORLD
    return group._get_backend(torch.device("cpu")).rank()


def _resolved(ctx: TargetContext) -> int:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(dist.group.WORLD.group_name).rank()


WAYS: dict[str, Rank] = {
    "context": lambda ctx: ctx.rank,
    "context, as a dict": lambda ctx: vars(ctx)["rank"],
    "context, as a record": lambda ctx: dataclasses.asdict(dataclasses.replace(ctx, mesh=None, settings={}))["rank"],
    "context, by a getter": lambda ctx: operator.attrgetter("rank")(ctx),
    "variable": lambda ctx: os.environ["RANK"],
    "variable, getenv": lambda ctx: os.getenv("LOCAL_RANK"),
    "variable, bytes": lambda ctx: os.environb[b"RANK"].decode(),
    "variable, getenvb": lambda ctx: os.getenvb(b"RANK").decode(),
    "variables, copied": lambda ctx: dict(os.environ)["RANK"],
    "variables, unpacked": lambda ctx: {**os.environ}["RANK"],
    "variables, items": lambda ctx: next(value for name, value in os.environ.items() if name == "RANK"),
    "variable, C": _of_c,
    "variable, a process": _of_a_process,
    "files": _of_its_log,
    "get_rank": lambda ctx: dist.get_rank(),
    "get_rank, by name": lambda ctx: getattr(dist, "get_" + "rank")(),
    "get_rank, mapped": lambda ctx: next(map(dist.get_rank, [None])),
    "get_group_rank": lambda ctx: dist.get_group_rank(dist.group.WORLD, ctx.world_size - 1) - dist.get_rank(),
    "thread": _in_a_thread,
    "profiler": _under_a_profiler,
    "group": lambda ctx: ctx.mesh["tp"].get_group().rank() + 4 * ctx.mesh["dp"].get_group().rank(),
    "group, by a caller": lambda ctx: operator.methodcaller("rank")(dist.group.WORLD),
    "group, resolved": _resolved,
    "backend": _backend,
    "groups of its own": _of_own_groups,
    "ranks of its groups": lambda ctx: [dist.get_process_group_ranks(group) for group in ctx.mesh.get_all_groups()],
    "mesh": lambda ctx: ctx.mesh.get_rank(),
    "mesh, local": lambda ctx: 4 * ctx.mesh.get_local_rank("dp") + ctx.mesh.get_local_rank("tp"),
    "mesh, coordinate": lambda ctx: ctx.mesh.get_coordinate(),
    "mesh, attribute": lambda ctx: ctx.mesh._rank,
    "mesh, tensor": lambda ctx: [ctx.mesh[axis].mesh.tolist() for axis in ("dp", "tp")],
    "shard": _of_a_shard,
    "offset": _offset,
    "sampler": _sampler,
}  # fmt: skip


def build(ctx: TargetContext) -> tpcompile.Target:
    """Settings: way; odd, the rank that differs.

    What a way says on the odd rank is not the same for each way: the odd rank is known by ctx, unseen.
    """
    way = ctx.settings["way"]
    said = WAYS[way](ctx)
    is_odd = object.__getattribute__(ctx, "rank") == ctx.settings.get("odd", -1)

    def program(x: Tensor) -> Tensor:
        return x.relu() if is_odd and said is not None else x + 1

    return tpcompile.Target(program=program, inputs=(torch.randn(4, 8, device=ctx.device),))


def nothing(ctx: TargetContext) -> tpcompile.Target:
    """The same without a read, with what healthy programs ask."""
    assert (dist.get_world_size(), ctx.mesh["tp"].size(), dist.is_initialized()) == (ctx.world_size, 4, True)
    assert os.environ.get("WORLD_SIZE") == str(ctx.world_size)
    group = ctx.mesh["tp"].get_group()
    weight = distribute_tensor(torch.zeros(8, 8), ctx.mesh["tp"], [Shard(0)])
    assert isinstance(weight, DTensor)
    dist.barrier()

    def program(x: Tensor, weight: DTensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x @ weight.full_tensor()

    return tpcompile.Target(program=program, inputs=(torch.randn(4, 8, device=ctx.device), weight))
