"""Tensor + group -> a collective in flight, and its result at `wait()`; what runs in between overlaps with it.

    pending = all_reduce_start(x, group=group, dst="I")
    other = independent_work()
    y = pending.wait()

The pair traces into one graph: the op where start is called, `wait_tensor` where wait is called. The backward overlaps
the same way: the wait's backward starts the backward collective, the start's backward waits for it. Results, gradients
and errors are those of the call without `_start`. Wait in the compiled region that started, exactly once: a second
wait raises ConfigError, and a result never waited for is never defined, while the collective still runs on all ranks.
Do not overwrite `x` before the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpcompile.torch_api import c10d as adapter
from tpcompile.collectives import checks, api as collectives, issue
from tpcompile.collectives.autograd import first_order
from tpcompile.ranks.groups import GroupLike, rank_index_of
from tpcompile.dist.plans import keep_plan, plan_of
from tpcompile.errors import ConfigError

_TWICE = "wait() was called twice on one pending collective; keep the tensor it returned"


class Pending:
    """A collective in flight. `wait()` gives the result, once."""

    __slots__ = ("_wait",)

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self._wait: Callable[[], Tensor] | None = wait

    def wait(self) -> Tensor:
        """The result. Raises ConfigError when it was fetched before."""
        if self._wait is None:
            raise ConfigError(_TWICE)
        wait, self._wait = self._wait, None
        return wait()


class _InFlight(Pending):
    """An eager collective without gradient, in the fewest steps; see `tpcompile.dist.plans`."""

    __slots__ = ("_raw", "_work")

    def __init__(self, raw: Tensor, work: Any) -> None:
        self._raw: Tensor | None = raw
        self._work = work

    def wait(self) -> Tensor:
        raw = self._raw
        if raw is None:
            raise ConfigError(_TWICE)
        self._raw = None
        if self._work is not None:
            self._work.wait()
        return raw


def all_reduce_start(x: Tensor, *, group: GroupLike, dst: collectives.Dst = "I", op: str = "sum") -> Pending:
    """Start `all_reduce`. max and min have no gradient here."""
    if not adapter.is_compiling() and (options := plan_of(x, group, "all_reduce_start", dst, op)) is not None:
        raw, work = adapter.send_all_reduce(x, options, group)
        return _InFlight(raw, work)
    checks.check_type("all_reduce_start", "dst", dst)
    found = checks.checked("all_reduce_start", x, group, checks.reducible(op))
    if op not in ("sum", "avg") and collectives._needs_grad(x):
        raise ConfigError(f"all_reduce_start: op={op!r} has no gradient here; detach the input, or call all_reduce")
    if found is None or collectives._is_observed():
        return _done(collectives.all_reduce(x, group=group, dst=dst, op=op))
    if op != "avg" and not adapter.is_tracing():
        keep_plan(x, group, adapter.all_reduce_options(op, later=True), "all_reduce_start", dst, op)
    step = _Step("all_reduce", found, op="sum" if op == "avg" else op, reverse="all_reduce" if dst == "R" else "same")
    pending = _start(x, step)
    return _then(pending, _divided, found.size()) if op == "avg" else Pending(pending)


def all_gather_start(x: Tensor, *, dim: int, group: GroupLike, dst: collectives.Dst = "R") -> Pending:
    """Start `all_gather_single`, equal sizes only."""
    if not adapter.is_compiling() and dim == 0 and type(x) is Tensor and not x.is_neg():
        shape = plan_of(x, group, "all_gather_start", dst, x.shape)
        if shape is not None:
            return _InFlight(*adapter.send_all_gather(x.contiguous(), shape, group, later=True))
    checks.check_type("all_gather_start", "dst", dst)
    found = checks.checked("all_gather_start", x, group)
    dim = checks.checked_dim("all_gather_start", x, dim)
    if found is None or collectives._is_observed():
        return _done(collectives.all_gather_single(x, dim=dim, group=group, dst=dst))
    if dim == 0 and not adapter.is_tracing():
        keep_plan(x, group, adapter.gathered_shape(x, found), "all_gather_start", dst, x.shape)
    step = _Step("all_gather", found, reverse="reduce_scatter" if dst == "R" else "own_shard")
    return _then(_start(x, step), issue.joined, dim, found.size())


def reduce_scatter_start(x: Tensor, *, dim: int, group: GroupLike) -> Pending:
    """Start `reduce_scatter_single`, equal sizes only."""
    if not adapter.is_compiling() and dim == 0 and type(x) is Tensor and not x.is_neg():
        shape = plan_of(x, group, "reduce_scatter_start", x.shape)
        if shape is not None:
            return _InFlight(*adapter.send_reduce_scatter(x.contiguous(), shape, group, later=True))
    found = checks.checked("reduce_scatter_start", x, group, checks.reducible("sum"))
    dim = checks.checked_dim("reduce_scatter_start", x, dim)
    checks.check_divides("reduce_scatter_start", x, dim, 1 if found is None else found.size())
    if found is None or collectives._is_observed():
        return _done(collectives.reduce_scatter_single(x, dim=dim, group=group))
    if dim == 0 and not adapter.is_tracing():
        keep_plan(x, group, adapter.scattered_shape(x, found), "reduce_scatter_start", x.shape)
    return Pending(_start(issue.stacked(x, dim, found.size()), _Step("reduce_scatter", found, reverse="all_gather")))


def all_to_all_start(
    x: Tensor,
    *,
    group: GroupLike,
    dim: int = 0,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> Pending:
    """Start `all_to_all_single`."""
    is_equal = input_splits is None and output_splits is None and dim == 0 and type(x) is Tensor
    if is_equal and not adapter.is_compiling() and not x.is_neg() and plan_of(x, group, "all_to_all_start", x.shape):
        return _InFlight(*adapter.send_all_to_all(x.contiguous(), group, later=True))
    found = checks.checked("all_to_all_start", x, group)
    dim = checks.checked_dim("all_to_all_start", x, dim)
    world = 1 if found is None else found.size()
    send, receive = collectives._checked_splits(x, dim, world, input_splits, output_splits)
    if found is None or collectives._is_observed():
        splits = {"input_splits": input_splits, "output_splits": output_splits}
        return _done(collectives.all_to_all_single(x, group=group, dim=dim, **splits))
    if is_equal and not adapter.is_tracing():
        keep_plan(x, group, True, "all_to_all_start", x.shape)
    step = _Step("all_to_all", found, reverse="all_to_all", splits=(receive, send))
    pending = _start(x.movedim(dim, 0) if dim else x, step)
    return _then(pending, torch.movedim, 0, dim) if dim else Pending(pending)


# Closures stand apart: a function whose locals are captured pays for the cells at every call.


def _done(result: Tensor) -> Pending:
    return Pending(lambda: result)


def _then(pending: Callable[[], Tensor], finish: Callable[..., Tensor], *args: Any) -> Pending:
    return Pending(lambda: finish(pending(), *args))


def _divided(x: Tensor, world: int) -> Tensor:
    return x / world


class _Step:
    """One collective along dim 0: how it begins, and which one its backward is."""

    def __init__(self, kind: str, group: Any, *, reverse: str, op: str = "sum", splits: Any = ((), ())) -> None:
        self.kind, self.group, self.reverse, self.op = kind, group, reverse, op
        self.receive, self.send = splits


def _begin(kind: str, x: Tensor, op: str, receive: Any, send: Any, group: Any) -> tuple[Tensor, Any]:
    wire = issue.to_wire(x)
    if kind == "all_reduce":
        return adapter.begin_all_reduce(wire, op, group, later=True)
    if kind == "all_gather":
        return adapter.begin_all_gather(wire, group, later=True)
    if kind == "reduce_scatter":
        return adapter.begin_reduce_scatter(wire, group, later=True)
    return adapter.begin_all_to_all(wire, list(receive), list(send), group, later=True)


def _start(x: Tensor, step: _Step) -> Callable[[], Tensor]:
    """Begin a step and return what ends it."""
    if x.is_complex():
        real = _start(torch.view_as_real(x.resolve_conj()), step)
        return lambda: torch.view_as_complex(real())
    flat = (step.kind, step.reverse, step.op, step.receive, step.send, step.group)
    if not collectives._needs_grad(x):
        raw, work = _begin(step.kind, x, step.op, step.receive, step.send, step.group)
        return lambda: adapter.end(raw, work)
    # Eager works travel beside the graph: forward from start to wait, backward from wait to start.
    works: Any = None if adapter.is_tracing() else {}
    own = rank_index_of(step.group.group_name, x.device) if step.reverse == "own_shard" else None
    raw, token = _Start.apply(x, works, *flat)
    return lambda: _Wait.apply(token, raw, own, works, *flat)


class _Start(torch.autograd.Function):
    """x -> (buffer in flight, token). The gradient of the token is a backward collective in flight.

    The token has the shape of x; the buffer need not, so it cannot carry that gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, works: Any, kind: str, reverse: str, op: str, receive: Any, send: Any, group: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.works, ctx.reverse = works, reverse
        raw, work = _begin(kind, x, op, receive, send, group)
        if works is not None:
            works["forward"] = work
        ctx.mark_non_differentiable(raw)
        ctx.set_materialize_grads(False)
        return raw, x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Any, grad: Tensor) -> Any:
        rest = (None,) * 7
        if ctx.reverse in ("same", "own_shard"):
            return grad, *rest
        work, _ = (adapter.FUNCTIONAL, None) if ctx.works is None else ctx.works.pop("backward")
        return adapter.end(grad, work), *rest


class _Wait(torch.autograd.Function):
    """(token, buffer in flight) -> result; its backward starts the backward collective."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        raw: Tensor,
        own: Tensor | None,
        works: Any,
        kind: str,
        reverse: str,
        op: str,
        receive: Any,
        send: Any,
        group: Any,
    ) -> Tensor:
        ctx.works, ctx.reverse, ctx.receive, ctx.send, ctx.group = works, reverse, receive, send, group
        if own is not None:
            ctx.save_for_backward(own)
        work = adapter.FUNCTIONAL if works is None else works.pop("forward")
        if work is not adapter.FUNCTIONAL:
            ctx.mark_dirty(raw)
        return adapter.end(raw, work)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        rest = (None,) * 9
        if ctx.reverse == "same":
            return grad, *rest
        if ctx.reverse == "own_shard":
            (own,) = ctx.saved_tensors
            return issue.own_shard(grad, own, 0, ctx.group.size()), *rest
        raw, work = _begin(ctx.reverse, grad, "sum", ctx.send, ctx.receive, ctx.group)
        if ctx.works is not None and grad.requires_grad:  # recorded, only to be refused: no buffer in flight then
            raw, work = adapter.end(raw, work), None
        if ctx.works is not None:
            ctx.works["backward"] = work, grad  # in flight: a second reference keeps autograd from adding into it
        return raw, *rest
