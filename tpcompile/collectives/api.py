"""Tensor + group -> tensor after a collective, with one stated gradient in eager and under compile.

    site                                      forward          backward         call
    column-linear input, replicated weight    identity         all-reduce       copy_to_tp
    row-linear output                         all-reduce       identity         all_reduce(dst="I")
    sums that ranks then use differently      all-reduce       all-reduce       all_reduce(dst="R")
    gather for work that differs per rank     all-gather       reduce-scatter   all_gather_single(dst="R")
    gather for work all ranks repeat          all-gather       own shard        all_gather_single(dst="I")
    row-linear output, sequence parallel      reduce-scatter   all-gather       reduce_scatter_single
    part of a replicated tensor               own shard        all-gather       scatter_single(src="I")
    tokens <-> heads, experts                 all-to-all       all-to-all       all_to_all_single
    what one rank knows                       broadcast        kept on src      broadcast

`dst` is the type of the result. I: replicated, with a replicated gradient (every rank repeats the work that follows).
R: replicated, with a partial gradient (the ranks do different work with it, so the gradients must be summed).

A group is a ProcessGroup, its name, a 1-D DeviceMesh, or (mesh, dim). A group of None or of size 1 returns the input
itself. Every function raises ConfigError before any rank communicates: when the input is not one dense tensor, when the
group cannot carry its dtype or device, and when this rank is not in the group. Gradients are first-order only:
differentiating one again raises TpCompileError. That shapes, dtypes, sizes, op and src are equal on all ranks is the
caller's responsibility and is not checked.

To add a collective: an `issue_*` function (traced and eager), an autograd.Function over it, a public function that
validates. `asynchronous.py` has the start/wait pairs, `tpcompile.torch_api.c10d` all private torch
API, and `plans.py` lets an eager call equal to one that passed the checks skip them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tpcompile.collectives import autograd, checks, issue
from tpcompile.collectives.observer import Call, active
from tpcompile.collectives.plans import keep_plan, plan_of, plan_of_shape
from tpcompile.errors import ConfigError
from tpcompile.ranks.groups import GroupLike, rank_index_of
from tpcompile.torch_api import c10d

Dst = Literal["I", "R"]


def all_reduce(x: Tensor, *, group: GroupLike, dst: Dst = "I", op: str = "sum") -> Tensor:
    """Reduce `x` over the group; same shape, contiguous, `x` is not modified.

    op: sum; avg, the sum divided by the group size, floats only; max, min; product, which has no gradient.
    dst="I": identity backward (row-linear output). dst="R": all-reduce backward (sum of squares of a distributed
    norm). avg divides the gradient by the group size; max and min pass it to the ranks that hold the extremum, split
    evenly among ties as torch.amax does, which costs an all-reduce in the backward.

    Raises ConfigError for an unknown `dst` or `op`, a dtype that `op` does not reduce, and product when a gradient is
    needed.
    """
    if not c10d.is_compiling():
        options = plan_of(x, group, "all_reduce", dst, op)
        if options is not None:
            return _all_reduce(x, group, dst, op) if _needs_grad(x) else c10d.all_reduce_now(x, options, group)
    checks.check_type("all_reduce", "dst", dst)
    found = checks.checked("all_reduce", x, group, checks.reducible(op))
    if op == "product" and _needs_grad(x):
        raise ConfigError("all_reduce: op='product' has no gradient here; detach the input, or sum logarithms")
    if found is None:
        return x
    if op not in ("avg", "product") and not c10d.is_tracing():
        keep_plan(x, group, c10d.all_reduce_options(op), "all_reduce", dst, op)
    if _is_observed():
        return _observe(Call("all_reduce", found, dst=dst, op=op), _all_reduce, x, found, dst, op)
    return _all_reduce(x, found, dst, op)


def copy_to_tp(x: Tensor, *, group: GroupLike) -> Tensor:
    """Enter a tensor-parallel region: identity forward, all-reduce (sum) of the gradient over `group` backward.

    Use it once per replicated tensor that sharded work reads: the input of a column-parallel linear, or a replicated
    parameter applied to sharded activations. Returns `x` itself when no gradient is needed.
    """
    if not c10d.is_compiling() and plan_of(x, group, "copy_to_tp", ""):
        return _copy_to_tp(x, group)
    found = checks.checked("copy_to_tp", x, group)
    if found is None:
        return x
    if not c10d.is_tracing():
        keep_plan(x, group, True, "copy_to_tp", "")
    if _is_observed():
        return _observe(Call("copy_to_tp", found), _copy_to_tp, x, found)
    return _copy_to_tp(x, found)


def all_gather_single(
    x: Tensor, *, dim: int, group: GroupLike, dst: Dst = "R", sizes: Sequence[int] | None = None
) -> Tensor:
    """Concatenate every rank's `x` along `dim`: size n becomes n * group size. All ranks must pass equal shapes.

    dst="R": reduce-scatter backward. dst="I": backward keeps this rank's shard of the gradient.
    sizes: uneven shards, the size of `dim` on every rank of the group; shards are sent padded to the largest. Shapes,
    and therefore graphs, then differ between ranks.

    Raises ConfigError for an unknown `dst`, a `dim` out of range, and sizes that do not match this rank's.
    """
    is_plannable = dim == 0 and sizes is None and not c10d.is_compiling()
    if is_plannable:
        shape = plan_of_shape(x, group, "all_gather_single", dst)
        if shape is not None:
            if _needs_grad(x):
                return _all_gather(x, dim, group, dst, None)
            raw, work = c10d.send_all_gather(x.contiguous(), shape, group)
            return c10d.received(raw, work)
    checks.check_type("all_gather_single", "dst", dst)
    found = checks.checked("all_gather_single", x, group)
    dim = checks.checked_dim("all_gather_single", x, dim)
    stated = checks.checked_sizes("all_gather_single", "sizes", sizes, checks.world_size(found))
    checks.check_own_size("all_gather_single", x, dim, stated, found)
    if found is None:
        return x
    if is_plannable:
        keep_plan(x, group, c10d.gathered_shape(x, found), "all_gather_single", x.shape, dst)
    stated = _uneven(stated)
    if _is_observed():
        call = Call("all_gather_single", found, dst=dst, dim=dim)
        return _observe(call, _all_gather, x, dim, found, dst, stated)
    return _all_gather(x, dim, found, dst, stated)


def reduce_scatter_single(x: Tensor, *, dim: int, group: GroupLike, sizes: Sequence[int] | None = None) -> Tensor:
    """Sum `x` over the group and keep this rank's part of `dim`: size n becomes n / group size; all-gather backward.

    sizes: uneven parts, the size of `dim` that each rank of the group keeps; see `all_gather_single`.
    Raises ConfigError for a `dim` out of range, a size that the group size does not divide, and sizes that do not add
    up to it.
    """
    is_plannable = dim == 0 and sizes is None and not c10d.is_compiling()
    if is_plannable:
        shape = plan_of_shape(x, group, "reduce_scatter_single")
        if shape is not None:
            if _needs_grad(x):
                return _reduce_scatter(x, dim, group, None)
            raw, work = c10d.send_reduce_scatter(x.contiguous(), shape, group)
            return c10d.received(raw, work)
    found = checks.checked("reduce_scatter_single", x, group, checks.reducible("sum"))
    dim = checks.checked_dim("reduce_scatter_single", x, dim)
    world = checks.world_size(found)
    stated = checks.checked_sizes("reduce_scatter_single", "sizes", sizes, world, total=x.shape[dim])
    if stated is None:
        checks.check_divides("reduce_scatter_single", x, dim, world)
    if found is None:
        return x
    if is_plannable:
        keep_plan(x, group, c10d.scattered_shape(x, found), "reduce_scatter_single", x.shape)
    stated = _uneven(stated)
    if _is_observed():
        call = Call("reduce_scatter_single", found, op="sum", dim=dim)
        return _observe(call, _reduce_scatter, x, dim, found, stated)
    return _reduce_scatter(x, dim, found, stated)


def all_to_all_single(
    x: Tensor,
    *,
    group: GroupLike,
    dim: int = 0,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> Tensor:
    """Send part r of `dim` of `x` to rank r of the group and concatenate the received parts along `dim`.

    Without splits all parts are equal and the shape is kept. Uneven: `input_splits[r]` of `dim` go to rank r,
    `output_splits[r]` come from it; rank a's output_splits[b] must equal rank b's input_splits[a]. Shapes, and
    therefore graphs, may then differ between ranks. Backward is the all-to-all with the splits exchanged.

    Raises ConfigError for a `dim` out of range, a size that the group size does not divide, input splits without output
    splits or the reverse, and input splits that do not add up to the size.
    """
    is_equal = input_splits is None and output_splits is None
    is_plannable = dim == 0 and is_equal and not c10d.is_compiling()
    if is_plannable and plan_of_shape(x, group, "all_to_all_single") and not _needs_grad(x):
        raw, work = c10d.send_all_to_all(x.contiguous(), group)
        return c10d.received(raw, work)
    found = checks.checked("all_to_all_single", x, group)
    dim = checks.checked_dim("all_to_all_single", x, dim)
    send, receive = _checked_splits(x, dim, checks.world_size(found), input_splits, output_splits)
    if found is None:
        return x
    if is_plannable:
        keep_plan(x, group, True, "all_to_all_single", x.shape)
    if _is_observed():
        call = Call("all_to_all_single", found, dim=dim)
        return _observe(call, _all_to_all, x, dim, receive, send, found)
    return _all_to_all(x, dim, receive, send, found)


def broadcast(x: Tensor, *, src: int, group: GroupLike, dst: Dst = "I") -> Tensor:
    """`x` of the group's rank `src`, on every rank; on the other ranks `x` gives shape and dtype only.

    dst="I": backward keeps the gradient on src. dst="R": backward sums the gradients over the group and keeps the sum
    on src. The other ranks get zeros. Raises ConfigError for an unknown `dst` and a `src` outside the group.
    """
    if not c10d.is_compiling():
        options = plan_of(x, group, "broadcast", dst, src)
        if options is not None:
            return _broadcast(x, src, group, dst) if _needs_grad(x) else c10d.broadcast_now(x, options, group)
    checks.check_type("broadcast", "dst", dst)
    found = checks.checked("broadcast", x, group)
    checks.check_src("broadcast", src, checks.world_size(found))
    if found is None:
        return x
    if not c10d.is_tracing():
        keep_plan(x, group, c10d.broadcast_options(src), "broadcast", dst, src)
    if _is_observed():
        return _observe(Call("broadcast", found, dst=dst), _broadcast, x, src, found, dst)
    return _broadcast(x, src, found, dst)


def scatter_single(x: Tensor, *, dim: int, group: GroupLike, src: Dst = "I") -> Tensor:
    """Copy the part of this rank of `group` of a replicated `x` along `dim`, without communication.

    src="I" (replicated gradient): all-gather backward. src="R" (partial gradient): backward puts zeros around this
    rank's part, so that the sum over ranks is the gradient. Raises ConfigError as reduce_scatter_single does.
    """
    checks.check_type("scatter_single", "src", src)
    found = checks.checked("scatter_single", x, group)
    dim = checks.checked_dim("scatter_single", x, dim)
    checks.check_divides("scatter_single", x, dim, checks.world_size(found))
    if found is None:
        return x
    if _is_observed():
        return _observe(Call("scatter_single", found, src=src, dim=dim), _scatter, x, dim, found, src)
    return _scatter(x, dim, found, src)


def _needs_grad(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _is_observed() -> bool:
    # is_compiling() first: Dynamo folds it, so neither graphs nor guards mention the observer.
    return not c10d.is_compiling() and active.observer is not None and not c10d.is_mode_tracing()


def _observe(call: Call, run: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    # The callers pass arguments, not a closure: a function whose locals are captured allocates cells at every call.
    assert active.observer is not None
    return active.observer.observe(call, x, lambda: run(x, *args))


def _uneven(sizes: issue.Sizes) -> issue.Sizes:
    if sizes is None or len(set(sizes)) == 1:
        return None
    return sizes


def _checked_splits(x: Tensor, dim: int, world: int, send: Any, receive: Any) -> tuple[Any, Any]:
    name = "all_to_all_single"
    if (send is None) != (receive is None):
        raise ConfigError(f"{name}: pass input_splits and output_splits, or neither")
    if send is None:
        checks.check_divides(name, x, dim, world)
        equal = (x.shape[dim] // world,) * world
        return equal, equal
    return (
        checks.checked_sizes(name, "input_splits", send, world, total=x.shape[dim]),
        checks.checked_sizes(name, "output_splits", receive, world),
    )


def _all_reduce(x: Tensor, group: Any, dst: str, op: str) -> Tensor:
    if not _needs_grad(x):
        return issue.issue_all_reduce(x, op, group)
    function = autograd.AllReduce if op in ("sum", "avg") else autograd.AllReduceExtremum
    return function.apply(x, group, dst, op)


def _copy_to_tp(x: Tensor, group: Any) -> Tensor:
    return autograd.CopyToTp.apply(x, group) if _needs_grad(x) else x


def _all_gather(x: Tensor, dim: int, group: Any, dst: str, sizes: issue.Sizes) -> Tensor:
    if not _needs_grad(x):
        return issue.issue_all_gather(x, dim, group, sizes)
    own = rank_index_of(group.group_name, x.device) if dst == "I" else None
    return autograd.AllGather.apply(x, own, dim, group, sizes)


def _reduce_scatter(x: Tensor, dim: int, group: Any, sizes: issue.Sizes) -> Tensor:
    if not _needs_grad(x):
        return issue.issue_reduce_scatter(x, dim, group, sizes)
    return autograd.ReduceScatter.apply(x, dim, group, sizes)


def _all_to_all(x: Tensor, dim: int, receive: Any, send: Any, group: Any) -> Tensor:
    if not _needs_grad(x):
        return issue.issue_all_to_all(x, dim, receive, send, group)
    return autograd.AllToAll.apply(x, dim, receive, send, group)


def _broadcast(x: Tensor, src: int, group: Any, dst: str) -> Tensor:
    if not _needs_grad(x):
        return issue.issue_broadcast(x, src, group)
    return autograd.Broadcast.apply(x, rank_index_of(group.group_name, x.device), src, group, dst)


def _scatter(x: Tensor, dim: int, group: Any, src: str) -> Tensor:
    own = rank_index_of(group.group_name, x.device)
    if not _needs_grad(x):
        return issue.own_shard(x, own, dim, group.size())
    return autograd.Scatter.apply(x, own, dim, group, src)
