"""Every name of torch that is private or moves -> one place; seen on torch 2.11.0 and 2.13.0.

    name                                          why
    torch.ops._c10d_functional.*                  collectives that trace; the public funcol returns a wrapper tensor
    torch._C._len_torch_dispatch_stack and modes  make_fx and fake tensors trace while is_compiling() is False
    distributed_c10d._resolve_process_group       a group name -> its group
    ProcessGroup.allreduce(...) and its options   what dist.all_reduce calls; 1 us less host time than through it
    ProcessGroup._allgather_base, ...             the same for gather, scatter and all-to-all; renamed in 2.13
    ProcessGroup._get_backend                     does this group have a backend for the device
    dist.GroupMember.NON_GROUP_MEMBER             what new_group gives the ranks that are not in the group
    distributed_c10d._process_group_name          name of a new group: hashed from how many groups the rank has seen

`tests/dist/test_adapter.py` fails when torch moves one of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

ops = torch.ops._c10d_functional
is_compiling = torch.compiler.is_compiling
num_modes = torch._C._len_torch_dispatch_stack
_mode = torch._C._get_dispatch_mode
_TRACING_MODES = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def is_tracing() -> bool:
    """True under Dynamo, torch.export, make_fx and fake tensors: then the functional ops must be used."""
    return is_compiling() or (num_modes() > 0 and is_mode_tracing())


def is_mode_tracing() -> bool:
    """True when a fake-tensor or a proxy mode is active, as under make_fx; Dynamo never gets here."""
    return any(_mode(key) is not None for key in _TRACING_MODES)


def group_of_name(name: str) -> Any:
    """The group registered under a name on this rank; raises RuntimeError when there is none."""
    return c10d._resolve_process_group(name)


def new_named_group(ranks: list[int], name: str, description: str) -> Any:
    """A group of these global ranks under this name; only they call, alike. Replaces torch's choice of the name.

    Torch hashes the number of groups this rank is in into the name of a group that only its members make. Ranks that
    are in different numbers of groups then wait for each other under different names until the timeout.
    """
    chosen = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: c10d.GroupName(name)
    try:
        return dist.new_group(ranks, use_local_synchronization=True, group_desc=description)
    finally:
        c10d._process_group_name = chosen


def known_group_names() -> list[str]:
    """Names of the groups this rank is in."""
    return sorted(c10d._world.pg_names.values())


def is_non_member(group: Any) -> bool:
    """True for what new_group returns on a rank that is not in the group."""
    return isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER


def has_backend(group: Any, device: torch.device) -> bool:
    """Can the group communicate tensors of this device."""
    try:
        return group._get_backend(device) is not None
    except RuntimeError:
        return False


def begin_all_reduce(x: Tensor, op: str, group: Any, *, later: bool = False) -> tuple[Tensor, Any]:
    """Real `x` -> contiguous result in flight and its work; `x` is left as it was."""
    if is_tracing():
        return ops.all_reduce(x.contiguous(), op, group.group_name), None
    # A clone, because contiguous() copies nothing when x is contiguous and the reduce would overwrite a live input.
    out = x.clone(memory_format=torch.contiguous_format)
    return out, group.allreduce([out], _ALL_REDUCE[op, later])


def all_reduce_now(x: Tensor, op: str, group: Any) -> Tensor:
    """begin_all_reduce and end for a real eager `x`, in the fewest calls: host time of small tensors is all calls."""
    out = x.clone(memory_format=torch.contiguous_format)
    work = group.allreduce([out], _ALL_REDUCE_NOW[op])
    if work is not None:
        work.wait()
    return out


def begin_all_gather(x: Tensor, group: Any, *, later: bool = False) -> tuple[Tensor, Any]:
    """Dense `x` [n, ...] -> [n * group size, ...] in flight and its work."""
    if is_tracing():
        return ops.all_gather_into_tensor(x, group.size(), group.group_name), None
    out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    return out, _all_gather(group, out, x, _ALL_GATHER[later])


def begin_reduce_scatter(x: Tensor, group: Any, *, later: bool = False) -> tuple[Tensor, Any]:
    """Dense `x` [n, ...] -> sum of this rank's [n / group size, ...] in flight and its work."""
    if is_tracing():
        return ops.reduce_scatter_tensor(x, "sum", group.size(), group.group_name), None
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    return out, _reduce_scatter(group, out, x, _REDUCE_SCATTER[later])


def begin_all_to_all(
    x: Tensor, receive: list[int], send: list[int], group: Any, *, later: bool = False
) -> tuple[Tensor, Any]:
    """Dense `x` [sum(send), ...] -> [sum(receive), ...] in flight and its work; empty splits are equal ones."""
    if is_tracing():
        return ops.all_to_all_single(x, receive, send, group.group_name), None
    out = x.new_empty((sum(receive), *x.shape[1:])) if receive else torch.empty_like(x)
    return out, _all_to_all(group, out, x, receive, send, _ALL_TO_ALL[later])


def begin_broadcast(x: Tensor, src: int, group: Any) -> tuple[Tensor, Any]:
    """Real `x` -> contiguous `x` of the rank at place `src` of the group, in flight, and its work."""
    if is_tracing():
        return ops.broadcast(x.contiguous(), src, group.group_name), None
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = src, 0, False
    out = x.clone(memory_format=torch.contiguous_format)
    return out, group.broadcast([out], options)


def end(raw: Tensor, work: Any) -> Tensor:
    """Wait for a collective in flight; a backend that synchronised in C++ gives no work."""
    if work is not None:
        work.wait()
        return raw
    return ops.wait_tensor(raw) if is_tracing() else raw


def _options(kind: Any, later: bool, op: Any = None) -> Any:
    # asyncOp=False keeps NCCL on the caller's stream, as dist.* does; the class itself defaults to True.
    options = kind()
    options.asyncOp = later
    if op is not None:
        options.reduceOp = op
    return options


_BOTH = (False, True)
_ALL_REDUCE = {(n, b): _options(dist.AllreduceOptions, b, op) for n, op in REDUCE_OPS.items() for b in _BOTH}
_ALL_REDUCE_NOW = {n: _ALL_REDUCE[n, False] for n in REDUCE_OPS}
_ALL_GATHER = {b: _options(c10d.AllgatherOptions, b) for b in _BOTH}
_REDUCE_SCATTER = {b: _options(dist.ReduceScatterOptions, b, dist.ReduceOp.SUM) for b in _BOTH}
_ALL_TO_ALL = {b: _options(dist.AllToAllOptions, b) for b in _BOTH}
_Group = dist.ProcessGroup
_all_gather: Any = getattr(_Group, "all_gather_single", None) or _Group._allgather_base
_reduce_scatter: Any = getattr(_Group, "reduce_scatter_single", None) or _Group._reduce_scatter_base
_all_to_all: Any = getattr(_Group, "all_to_all_single", None) or _Group.alltoall_base
