"""`nccl`, `by_size` or a table -> options of torch.compile with a pass over graphs, and one line that ranks compare."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

from tpcompile.by_size import in_flight, packed_sums, pushed_sums, tuned, tuning
from tpcompile.by_size.op import OP, chosen, dtype_name
from tpcompile.by_size.packed_sums import pack
from tpcompile.by_size.pushed_sums import Pushing, only_wait, push, replace_by_call, summed
from tpcompile.by_size.table import DTYPES, NCCL, Table, shipped, shown
from tpcompile.choices import SUMMED_RANKS, AllReduce
from tpcompile.errors import ConfigError
from tpcompile.ranks.groups import GroupLike, resolve_group
from tpcompile.torch_api import c10d
from tpcompile.torch_api.c10d import ops
from tpcompile.torch_api.passes import AFTER_AUTOGRAD, SharedPass, get_hash_for_files

CPU = "cpu"
_NCCL_BACKEND = "cuda:nccl"
# By the group itself, as long as it exists: ranks that have agreed once must not wait for each other again.
_TABLES: weakref.WeakKeyDictionary[dist.ProcessGroup, Table] = weakref.WeakKeyDictionary()
_DECLINED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def sums(setting: AllReduce | Table, group: GroupLike = None, *, timeout_s: float = 120.0) -> Sums | None:
    """How compiled graphs sum over ranks; None for `nccl`, which changes nothing. Raises ConfigError for others.

    With `by_size` on GPUs all ranks of the group, None for those of the job, call it alike: what none of them has
    measured before they measure together, which takes some seconds once on a machine; a later call for the group is a
    lookup. A rank waits for the others for half of `timeout_s`: the comparison before the first call, which waits that
    long, is to find this rank there. A rank that sums by NCCL alone says so, and none waits for it.
    """
    if isinstance(setting, Table):
        return Sums(setting)
    if setting not in get_args(AllReduce):
        names = ", ".join(get_args(AllReduce))
        raise ConfigError(f"unknown all_reduce {setting!r}; choose from {names}, or give a tpcompile.by_size.Table")
    found = resolve_group(group) or dist.group.WORLD
    has_peers = found is not None and found.size() > 1 and _device().type != CPU
    if setting == "nccl":
        if has_peers and found not in _DECLINED:
            _DECLINED.add(found)
            tuned.decline(found, 'all_reduce="nccl"')
        return None
    if not has_peers:
        return Sums(shipped())
    if found not in _TABLES:
        _TABLES[found] = _table_of(found, timeout_s / 2)
    return Sums(_TABLES[found])


def _table_of(group: dist.ProcessGroup, timeout_s: float) -> Table:
    device = _device()
    gpu, why_never = gpu_of(device), ""
    if group.size() not in SUMMED_RANKS:
        why_never = f"torch's kernels sum over {', '.join(map(str, SUMMED_RANKS))} ranks"
    elif not _can_share(group, device):
        why_never = "several hosts, LOCAL_WORLD_SIZE is not set, or the backend is not NCCL"
    if why_never:  # alike on all ranks, which need not meet
        if group.rank() == 0:
            tuned.logger.warning("no sums over {} x {} are made by size: {}", group.size(), gpu, why_never)
        return shipped()
    measure = partial(tuning.measure, group, device, gpu, "all_reduce=by_size")
    return tuned.tuned(group, gpu, measure, timeout_s=timeout_s, obstacle=tuned.obstacle_here(device))


@dataclass(frozen=True)
class Sums:
    """Sums by the rows of a table."""

    table: Table

    @property
    def options(self) -> dict[str, Any]:
        """Options of torch.compile for the backend inductor."""
        return {AFTER_AUTOGRAD: ReplacingPass(OP, self, pushing=in_flight.OPS)}

    def text(self, group: dist.ProcessGroup | None) -> str:
        """`by_size, table 1f0a...: two_shot to 8388608 bytes, nccl above (2 x NVIDIA H100)`; None is the job."""
        found, device = group or dist.group.WORLD, _device()
        num_ranks = 1 if found is None else found.size()
        place = f"{num_ranks} x {gpu_of(device)}"
        is_measured = _can_share(found, device) and self.table.cell(gpu_of(device), num_ranks) is not None
        rows = f"{shown(*self._chosen(found, device))} ({place})" if is_measured else f"not measured on {place}: nccl"
        return f"by_size, table {self.table.digest}: {rows}"

    def rows_for(self, x: Tensor, group_name: str) -> str:
        """The rows for a fake tensor; empty where NCCL sums all its sizes."""
        group = c10d.group_of_name(group_name)
        rows, _ = self._chosen(group, x.device)
        if rows and group.rank() == 0:
            _warn_of(x.dtype)
        is_known = all(isinstance(size, int) for size in x.shape)
        if is_known and chosen(x, rows, group.size()) == NCCL:
            return ""
        return rows

    def pushes(self, x: Tensor, group_name: str) -> bool:
        """True when copy engines send a sum of two ranks that has work beside it; never for one of unknown size."""
        _, least = self._chosen(c10d.group_of_name(group_name), x.device)
        is_known = all(isinstance(size, int) for size in x.shape)
        return least is not None and is_known and x.numel() * x.itemsize >= least

    def identity(self) -> tuple[str, ...]:
        """The table, the GPU, and the rows of each group of this process by its name."""
        device = _device()
        chosen = [(name, *self._chosen(group, device)) for group, name in c10d.known_groups()]
        of_groups = sorted(f"{name}={rows} {push_from}" for name, rows, push_from in chosen)
        return (self.table.digest, gpu_of(device), *of_groups)

    def _chosen(self, group: Any, device: torch.device) -> tuple[str, int | None]:
        """(rows, bytes from which on sums are pushed) for a group; none where its ranks cannot share memory."""
        if not _can_share(group, device):
            return "", None
        cell = (gpu_of(device), group.size())
        return self.table.rows(*cell), self.table.push_from(*cell)


@cache
def _warn_of(dtype: torch.dtype) -> None:
    """Say once that sums of floating-point numbers are left to NCCL."""
    name = dtype_name(dtype)
    if dtype.is_floating_point and name not in DTYPES:
        tuned.logger.warning("NCCL makes the sums of {}; by size are those of {}", name, " and ".join(DTYPES))


def gpu_of(device: torch.device) -> str:
    """Model of a GPU; `cpu` for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU


def _can_share(group: Any, device: torch.device) -> bool:
    """True when torchrun's variables say that all ranks are on one host; False where they are not set."""
    num_on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if group is None or num_on_host == 0:
        return False
    ranks = dist.get_process_group_ranks(group)
    is_on_one_host = min(ranks) // num_on_host == max(ranks) // num_on_host
    return is_on_one_host and (device.type != "cuda" or _NCCL_BACKEND in dist.get_backend_config(group))


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device(CPU)


class ReplacingPass(SharedPass):
    """Packs small sums; replaces those in flight by the ops of `pushing`, and others by `op(x, rows, group name)`."""

    def __init__(self, op: Callable[..., Tensor], chooser: Sums, *, pushing: Pushing | None = None) -> None:
        self._op, self._chooser, self._pushing = op, chooser, pushing

    def __call__(self, graph: Graph) -> None:
        """Edit the graph in place."""
        pack(graph)
        if self._pushing is not None:
            push(graph, self._pushing, self._chooser.pushes)
        for start in graph.find_nodes(op="call_function", target=ops.all_reduce.default):
            wait, value = start.next, summed(start)
            if value is None or only_wait(start) is not wait:  # something may run beside the collective
                continue
            x, _, group_name = start.args
            rows = self._chooser.rows_for(value, str(group_name))
            if rows:
                replace_by_call(wait, self._op, (x, rows, group_name))
                start.graph.erase_node(start)

    def uuid(self) -> Any:
        """Code is cached for these files, the ops and what the chooser decides."""
        files = get_hash_for_files((__file__, packed_sums.__file__, pushed_sums.__file__))
        return ("tpcompile", files, str(self._op), str(self._pushing), self._chooser.identity())
