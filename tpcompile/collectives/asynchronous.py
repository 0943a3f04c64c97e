"""Tensor + group -> a collective in flight, and its result at `wait()`; work between the two calls overlaps with it.

    pending = all_reduce_start(x, group=group, dst="I")
    other = independent_work()
    y = pending.wait()

The pair traces into one graph: the op where start is called, `wait_tensor` where wait is called. The backward overlaps
in the same way: the backward of wait starts the backward collective, the backward of start waits for it. Results,
gradients and errors are those of the call without `_start`. Call `wait()` exactly once, in the compiled region that
called start: a second call raises ConfigError, and without it the result is undefined although the collective runs.
Do not overwrite `x` before the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpcompile.collectives import api as collectives
from tpcompile.collectives import checks, issue
from tpcompile.collectives.autograd import first_order
from tpcompile.collectives.plans import keep_plan, plan_of, plan_of_shape
from tpcompile.errors import ConfigError
from tpcompile.ranks.groups import GroupLike, rank_index_of
from tpcompile.torch_api import c10d

_TWICE = "wait() was called twice on one pending collective; keep the tensor it returned"


class Pending:
    """A collective in flight. `wait()` gives the result, once."""

    __slots__ = ("_wait",)

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self._wait: Callable[[], Tensor] | None = wait

    def wait(self) -> Tensor:
        """Wait and return the result. Raises ConfigError when called a second time."""
        if self._wait is None:
            raise ConfigError(_TWICE)
        wait, self._wait = self._wait, None
        return wait()


class _InFlight(Pending):
    """An eager collective without gradient, in the fewest steps; see `tpcompile.collectives.plans`."""

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
    """Start `all_reduce`; arguments as for `all_reduce`. Gradients for sum and avg only."""
    if not c10d.is_compiling():
        options = plan_of(x, group, "all_reduce_start", dst, op)
        if options is not None and not collectives._needs_grad(x):
            raw, work = c10d.send_all_reduce(x, options, group)
            return _InFlight(raw, work)
    checks.check_type("all_reduce_start", "dst", dst)
    found = checks.checked("all_reduce_start", x, group, checks.reducible(op))
    if op not in ("sum", "avg") and collectives._needs_grad(x):
        raise ConfigError(f"all_reduce_start: op={op!r} has no gradient here; detach the input, or call all_reduce")
    if found is None or collectives._is_observed():
        return _done(collectives.all_reduce(x, group=group, dst=dst, op=op))
    reverse = "all_reduce" if dst == "R" else "same"
    if op == "avg":
        total = _start(x, _Step("all_reduce", found, reverse=reverse))
        return _then(total, torch.div, found.size())  # gloo has no average
    if not c10d.is_tracing():
        keep_plan(x, group, c10d.all_reduce_options(op, later=True), "all_reduce_start", dst, op)
    return Pending(_start(x, _Step("all_reduce", found, op=op, reverse=reverse)))


def all_gather_start(x: Tensor, *, dim: int, group: GroupLike, dst: collectives.Dst = "R") -> Pending:
    """Start `all_gather_single` of equal shards; arguments as for `all_gather_single`."""
    is_plannable = dim == 0 and not c10d.is_compiling()
    if is_plannable:
        shape = plan_of_shape(x, group, "all_gather_start", dst)
        if shape is not None and not collectives._needs_grad(x):
            raw, work = c10d.send_all_gather(x.contiguous(), shape, group, later=True)
            return _InFlight(raw, work)
    checks.check_type("all_gather_start", "dst", dst)
    found = checks.checked("all_gather_start", x, group)
    dim = checks.checked_dim("all_gather_start", x, dim)
    if found is None or collectives._is_observed():
        return _done(collectives.all_gather_single(x, dim=dim, group=group, dst=dst))
    if is_plannable:
        keep_plan(x, group, c10d.gathered_shape(x, found), "all_gather_start", x.shape, dst)
    reverse = "reduce_scatter" if dst == "R" else "own_shard"
    gathered = _start(x, _Step("all_gather", found, reverse=reverse))
    return _then(gathered, issue.joined, dim, found.size())


def reduce_scatter_start(x: Tensor, *, dim: int, group: GroupLike) -> Pending:
    """Start `reduce_scatter_single` into equal parts; arguments as for `reduce_scatter_single`."""
    is_plannable = dim == 0 and not c10d.is_compiling()
    if is_plannable:
        shape = plan_of_shape(x, group, "reduce_scatter_start")
        if shape is not None and not collectives._needs_grad(x):
            raw, work = c10d.send_reduce_scatter(x.contiguous(), shape, group, later=True)
            return _InFlight(raw, work)
    found = checks.checked("reduce_scatter_start", x, group, checks.reducible("sum"))
    dim = checks.checked_dim("reduce_scatter_start", x, dim)
    checks.check_divides("reduce_scatter_start", x, dim, checks.world_size(found))
    if found is None or collectives._is_observed():
        return _done(collectives.reduce_scatter_single(x, dim=dim, group=group))
    if is_plannable:
        keep_plan(x, group, c10d.scattered_shape(x, found), "reduce_scatter_start", x.shape)
    parts = issue.stacked(x, dim, found.size())
    return Pending(_start(parts, _Step("reduce_scatter", found, reverse="all_gather")))


def all_to_all_start(
    x: Tensor,
    *,
    group: GroupLike,
    dim: int = 0,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
) -> Pending:
    """Start `all_to_all_single`; arguments as for `all_to_all_single`."""
    is_equal = input_splits is None and output_splits is None
    is_plannable = dim == 0 and is_equal and not c10d.is_compiling()
    if is_plannable and plan_of_shape(x, group, "all_to_all_start") and not collectives._needs_grad(x):
        raw, work = c10d.send_all_to_all(x.contiguous(), group, later=True)
        return _InFlight(raw, work)
    found = checks.checked("all_to_all_start", x, group)
    dim = checks.checked_dim("all_to_all_start", x, dim)
    send, receive = collectives._checked_splits(x, dim, checks.world_size(found), input_splits, output_splits)
    if found is None or collectives._is_observed():
        splits = {"input_splits": input_splits, "output_splits": output_splits}
        return _done(collectives.all_to_all_single(x, group=group, dim=dim, **splits))
    if is_plannable:
        keep_plan(x, group, True, "all_to_all_start", x.shape)
    step = _Step("all_to_all", found, reverse="all_to_all", splits=(receive, send))
    if dim == 0:
        return Pending(_start(x, step))
    received = _start(x.movedim(dim, 0), step)
    return _then(received, torch.movedim, 0, dim)


# The closures are made here: a function whose locals are captured allocates cells at every call.


def _done(result: Tensor) -> Pending:
    return Pending(lambda: result)


def _then(pending: Callable[[], Tensor], finish: Callable[..., Tensor], *args: Any) -> Pending:
    return Pending(lambda: finish(pending(), *args))


class _Step:
    """One collective along dim 0 and the kind of its backward."""

    def __init__(self, kind: str, group: Any, *, reverse: str, op: str = "sum", splits: Any = ((), ())) -> None:
        self.kind, self.group, self.reverse, self.op = kind, group, reverse, op
        self.receive, self.send = splits


def _begin(kind: str, x: Tensor, op: str, receive: Any, send: Any, group: Any) -> tuple[Tensor, Any]:
    wire = issue.to_wire(x)
    if kind == "all_reduce":
        return c10d.begin_all_reduce(wire, op, group, later=True)
    if kind == "all_gather":
        return c10d.begin_all_gather(wire, group, later=True)
    if kind == "reduce_scatter":
        return c10d.begin_reduce_scatter(wire, group, later=True)
    return c10d.begin_all_to_all(wire, list(receive), list(send), group, later=True)


def _start(x: Tensor, step: _Step) -> Callable[[], Tensor]:
    """Begin a step; the function that is returned waits for its result."""
    if x.is_complex():
        real = _start(torch.view_as_real(x.resolve_conj()), step)
        return lambda: torch.view_as_complex(real())
    flat = (step.kind, step.reverse, step.op, step.receive, step.send, step.group)
    if not collectives._needs_grad(x):
        raw, work = _begin(step.kind, x, step.op, step.receive, step.send, step.group)
        return lambda: c10d.end(raw, work)
    # Eager works are passed outside the autograd graph: forward from start to wait, backward from wait to start.
    works: Any = None if c10d.is_tracing() else {}
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
        work = c10d.FUNCTIONAL
        if ctx.works is not None:
            work, _ = ctx.works.pop("backward")
        return c10d.end(grad, work), *rest


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
        if works is None:
            return c10d.end(raw, c10d.FUNCTIONAL)
        work = works.pop("forward")
        if work is not c10d.FUNCTIONAL:
            ctx.mark_dirty(raw)
        return c10d.end(raw, work)

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
        if ctx.works is None:
            return raw, *rest
        if grad.requires_grad:  # create_graph=True: differentiating again raises, so nothing may be left in flight
            raw, work = c10d.end(raw, work), None
        ctx.works["backward"] = work, grad  # the second reference keeps autograd from accumulating into `grad`
        return raw, *rest
