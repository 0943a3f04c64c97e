"""Private or renamed torch API that the collectives need, all of it; seen on torch 2.11.0 and 2.13.0.

    name                                          why
    torch.ops._c10d_functional.*                  collectives that trace; the public funcol returns a wrapper tensor
    torch._C._len_torch_dispatch_stack and modes  make_fx, fake tensors and selective checkpointing, all in eager
    distributed_c10d._resolve_process_group       a group name -> its group
    ProcessGroup.allreduce(...) and its options   what dist.all_reduce calls; 2 us less host time than through it
    ProcessGroup._allgather_base, ...             the same for gather, scatter and all-to-all; renamed in 2.13
    ProcessGroup._get_backend                     does this group have a backend for the device
    distributed_c10d._world.pg_names              the groups of this rank and their names
    dist.GroupMember.NON_GROUP_MEMBER             what new_group gives the ranks that are not in the group
    distributed_c10d._get_default_store           the store of a job that has no MASTER_ADDR
    distributed_c10d._process_group_name          name of a new group: hashed from how many groups the rank has seen
    distributed_c10d._new_group_with_tag          every group is made by it, those of a mesh as well
    ProcessGroup.rank, Backend.rank               the rank, in C
    ProcessGroup.shutdown, ProcessGroup.abort     what ends a group, however destroy_process_group was imported

`tests/torch_api/test_c10d.py` fails when torch moves one of them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.text.lines import is_library_file, line_of_frame

ops = torch.ops._c10d_functional
is_compiling = torch.compiler.is_compiling
num_modes = torch._C._len_torch_dispatch_stack
_modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack
_mode = torch._C._get_dispatch_mode
_EXPOSES_INTERMEDIATES = torch.__version__ < "2.13"
_TRACING_MODES = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)

WITH_RANK = (dist.ProcessGroup, torch._C._distributed_c10d.Backend)
"""Classes whose `rank` says the rank."""
_ENDS = ("shutdown", "abort")
"""Methods of a process group that end it."""
FUNCTIONAL = "functional"
"""Stands for the Work of a collective issued as a functional op; torch keeps the real one with the tensor."""
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def is_tracing() -> bool:
    """True under Dynamo, torch.export, make_fx and fake tensors, where tensors have no data and no Work can be kept."""
    return is_compiling() or (num_modes() > 0 and is_mode_tracing())


def is_functional() -> bool:
    """True where a collective must be the functional op: when traced, and in eager under a dispatch mode.

    A mode may replace the result of an op by one that it saved, as selective activation checkpointing does. It cannot
    do so for the in-place op, whose buffer would then stay uninitialised. A mode whose class sets
    `sees_in_place_ops = True` saves no results.
    """
    if is_compiling():
        return True
    return num_modes() > 0 and not all(getattr(mode, "sees_in_place_ops", False) for mode in _modes())


def is_mode_tracing() -> bool:
    """True when a fake-tensor or a proxy mode is active, as under make_fx; Dynamo never gets here."""
    return any(_mode(key) is not None for key in _TRACING_MODES)


def group_of_name(name: str) -> Any:
    """The group registered under a name on this rank; raises RuntimeError when there is none."""
    return c10d._resolve_process_group(name)


def new_named_group(ranks: list[int], name: str, description: str) -> Any:
    """A group of these global ranks with this name, which replaces torch's; its members call it, with equal arguments.

    For a group that only its members make, torch hashes the number of groups of this rank into the name. Ranks in
    different numbers of groups would then wait under different names until the timeout.
    """
    chosen = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: c10d.GroupName(name)
    try:
        return dist.new_group(ranks, use_local_synchronization=True, group_desc=description)
    finally:
        c10d._process_group_name = chosen


class GroupMade(NamedTuple):
    """A process group that all ranks of the job make together, its members and the others."""

    name: str
    """Its description, where it has one."""
    ranks: tuple[int, ...]
    """Global ranks."""
    line: UserLine | None
    """The user's line."""


@contextmanager
def groups_made() -> Iterator[list[GroupMade]]:
    """Yield the groups that are made within, in order, but for those that their members make alone."""
    made: list[GroupMade] = []
    real = c10d._new_group_with_tag

    @functools.wraps(real)
    def make(ranks: Any = None, *arguments: Any, **options: Any) -> Any:
        if not options.get("use_local_synchronization"):
            all_ranks = range(dist.get_world_size()) if ranks is None else ranks
            users: FrameType | None = sys._getframe(1)
            while users is not None and is_library_file(users.f_code.co_filename):
                users = users.f_back
            line = line_of_frame(users) if users is not None else None
            made.append(GroupMade(options.get("group_desc") or "", tuple(all_ranks), line))
        return real(ranks, *arguments, **options)

    with mock.patch.object(c10d, "_new_group_with_tag", make):
        yield made


def known_groups() -> list[tuple[Any, str]]:
    """(group, its name) of the groups this rank is in, in the order in which they were made."""
    return list(c10d._world.pg_names.items())  # a copy: a different thread may create a group meanwhile


def own_client_of_default_store() -> dist.Store:
    """A client of its own of the store of the default group; raises ValueError without a process group."""
    return c10d._get_default_store().clone()


def is_non_member(group: Any) -> bool:
    """True for the value that new_group returns on a rank outside of the group."""
    return isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER


def has_backend(group: Any, device: torch.device) -> bool:
    """True when the group can communicate tensors of this device."""
    try:
        return group._get_backend(device) is not None
    except RuntimeError:
        return False


def before_shutdown(act: Callable[[], object]) -> Callable[[], None]:
    """Call `act` before a group of this process shuts down or is aborted; returns what undoes it."""
    before = {name: vars(dist.ProcessGroup)[name] for name in _ENDS}  # getattr would lose how it binds
    for name in _ENDS:
        setattr(dist.ProcessGroup, name, _preceded(getattr(dist.ProcessGroup, name), act))

    def undo() -> None:
        for name, end in before.items():
            setattr(dist.ProcessGroup, name, end)

    return undo


def _preceded(end: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    @functools.wraps(end)
    def acts_and_ends(*args: Any, **kwargs: Any) -> Any:
        act()
        return end(*args, **kwargs)

    return acts_and_ends


def begin_all_reduce(x: Tensor, op: str, group: Any, *, later: bool = False) -> tuple[Tensor, Any]:
    """Real `x` -> contiguous result in flight and its work; `x` is left as it was."""
    if is_functional():
        return ops.all_reduce(x.contiguous(), op, group.group_name), FUNCTIONAL
    return send_all_reduce(x, all_reduce_options(op, later=later), group)


def functional_sum(x: Tensor, group_name: str) -> tuple[Tensor, Any]:
    """`x` -> its contiguous sum over the ranks in flight and its work, as compiled code issues it."""
    return ops.all_reduce(x.contiguous(), "sum", group_name), FUNCTIONAL


def functional_gather(x: Tensor, group: Any) -> tuple[Tensor, Any]:
    """`x` [n, ...] -> [n * group size, ...] in flight and its work, as compiled code issues it."""
    return ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name), FUNCTIONAL


def begin_all_gather(x: Tensor, group: Any, *, later: bool = False) -> tuple[Tensor, Any]:
    """Dense `x` [n, ...] -> [n * group size, ...] in flight and its work."""
    if is_functional():
        return functional_gather(x, group)
    return send_all_gather(x, gathered_shape(x, group), group, later=later)


def begin_reduce_scatter(x: Tensor, group: Any, *, later: bool = False) -> tuple[Tensor, Any]:
    """Dense `x` [n, ...] -> sum of this rank's [n / group size, ...] in flight and its work."""
    if is_functional():
        return ops.reduce_scatter_tensor(x, "sum", group.size(), group.group_name), FUNCTIONAL
    return send_reduce_scatter(x, scattered_shape(x, group), group, later=later)


def begin_all_to_all(
    x: Tensor, receive: list[int], send: list[int], group: Any, *, later: bool = False
) -> tuple[Tensor, Any]:
    """Dense `x` [sum(send), ...] -> [sum(receive), ...] in flight and its work; empty splits are equal ones."""
    if is_functional():
        return ops.all_to_all_single(x, receive, send, group.group_name), FUNCTIONAL
    if not receive:
        return send_all_to_all(x, group, later=later)
    out = x.new_empty((sum(receive), *x.shape[1:]))
    work = _all_to_all(group, out, x, receive, send, _ALL_TO_ALL[later])
    return out, work


def begin_broadcast(x: Tensor, src: int, group: Any) -> tuple[Tensor, Any]:
    """Real `x` -> contiguous `x` of the rank at place `src` of the group; in flight as a functional op."""
    if is_functional():
        return ops.broadcast(x.contiguous(), src, group.group_name), FUNCTIONAL
    return broadcast_now(x, broadcast_options(src), group), None


# The eager calls in the fewest steps: host time of small tensors is the number of steps. What can be made once per
# group and shape (options, shape of the result) is an argument. new_empty(*shape) parses faster than new_empty(shape).
# A clone where c10d works in place, because contiguous() copies nothing when x is contiguous and the collective would
# overwrite a live input. c10d ignores a lazy negation: clone resolves it, the other calls need it resolved.


def send_all_reduce(x: Tensor, options: Any, group: Any) -> tuple[Tensor, Any]:
    """begin_all_reduce of an eager tensor, by `all_reduce_options`."""
    out = x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return out, group.allreduce([out], options)


def all_reduce_now(x: Tensor, options: Any, group: Any) -> Tensor:
    """send_all_reduce and received in one: the two calls alone are 7 % of its host time."""
    out = x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    work = group.allreduce([out], options)
    if work is not None:
        work.wait()
    return out


def send_all_gather(x: Tensor, shape: tuple[int, ...], group: Any, *, later: bool = False) -> tuple[Tensor, Any]:
    """begin_all_gather of an eager tensor, by `gathered_shape`."""
    out = x.new_empty(*shape)
    return out, _all_gather(group, out, x, _ALL_GATHER[later])


def send_reduce_scatter(x: Tensor, shape: tuple[int, ...], group: Any, *, later: bool = False) -> tuple[Tensor, Any]:
    """begin_reduce_scatter of an eager tensor, by `scattered_shape`."""
    out = x.new_empty(*shape)
    return out, _reduce_scatter(group, out, x, _REDUCE_SCATTER[later])


def send_all_to_all(x: Tensor, group: Any, *, later: bool = False) -> tuple[Tensor, Any]:
    """begin_all_to_all of an eager tensor in equal parts."""
    out = torch.empty_like(x)
    return out, _all_to_all(group, out, x, [], [], _ALL_TO_ALL[later])


def broadcast_now(x: Tensor, options: Any, group: Any) -> Tensor:
    """begin_broadcast of an eager tensor, by `broadcast_options`, and its end."""
    out = x.clone() if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    work = group.broadcast([out], options)
    if work is not None:
        work.wait()
    return out


def received(raw: Tensor, work: Any) -> Tensor:
    """Wait for an eager collective in flight; `work` is None when the backend synchronised in C++."""
    if work is not None:
        work.wait()
    return raw


def end(raw: Tensor, work: Any) -> Tensor:
    """Wait for a collective in flight, through its Work or the functional `wait_tensor`."""
    if work is not FUNCTIONAL:
        return received(raw, work)
    done = ops.wait_tensor(raw)
    # Dynamo before 2.13 makes every intermediate of a traced autograd.Function an output beside its result. wait_tensor
    # returns its own input, so without AOTAutograd two outputs are one tensor, and the gradient goes to the unused one:
    # it is zero. detach makes them two tensors; Inductor removes it.
    return done.detach() if _EXPOSES_INTERMEDIATES and torch.compiler.is_dynamo_compiling() else done


def all_reduce_options(op: str, *, later: bool = False) -> Any:
    """Options for `send_all_reduce`."""
    return _ALL_REDUCE[op, later]


def broadcast_options(src: int) -> Any:
    """Options for `broadcast_now`."""
    options = _options(dist.BroadcastOptions, False)
    options.rootRank, options.rootTensor = src, 0
    return options


def gathered_shape(x: Tensor, group: Any) -> tuple[int, ...]:
    """Shape of `send_all_gather`'s result."""
    return (group.size() * x.shape[0], *x.shape[1:])


def scattered_shape(x: Tensor, group: Any) -> tuple[int, ...]:
    """Shape of `send_reduce_scatter`'s result."""
    return (x.shape[0] // group.size(), *x.shape[1:])


def _options(kind: Any, later: bool, op: Any = None) -> Any:
    # asyncOp=False keeps NCCL on the caller's stream, as dist.* does; the class itself defaults to True.
    options = kind()
    options.asyncOp = later
    if op is not None:
        options.reduceOp = op
    return options


_BOTH = (False, True)
_ALL_REDUCE = {(n, b): _options(dist.AllreduceOptions, b, op) for n, op in REDUCE_OPS.items() for b in _BOTH}
_ALL_GATHER = {b: _options(c10d.AllgatherOptions, b) for b in _BOTH}
_REDUCE_SCATTER = {b: _options(dist.ReduceScatterOptions, b, dist.ReduceOp.SUM) for b in _BOTH}
_ALL_TO_ALL = {b: _options(dist.AllToAllOptions, b) for b in _BOTH}
_Group = dist.ProcessGroup
_all_gather: Any = getattr(_Group, "all_gather_single", None) or _Group._allgather_base
_reduce_scatter: Any = getattr(_Group, "reduce_scatter_single", None) or _Group._reduce_scatter_base
_all_to_all: Any = getattr(_Group, "all_to_all_single", None) or _Group.alltoall_base
