"""Collectives -> types of their results: calls of our wrappers, torch's functional ops, and in-place c10d calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpcompile.typecheck.gradients import described
from tpcompile.typecheck.rules_pointwise import used_as_whole
from tpcompile.typecheck.spmd import UNKNOWN, SpmdType
from tpcompile.typecheck.step import Result, Step, rule, tensors_in
from tpcompile.collectives.observer import Call

_FITS = {"sum": ("sum",), "mean": ("sum", "avg"), "max": ("max",), "min": ("min",), "product": ("product",)}
_SUMS = ("sum", "avg")
CallRule = Callable[[Step, Call, SpmdType], SpmdType]
CALLS: dict[str, CallRule] = {}


def _call(name: str) -> Callable[[CallRule], CallRule]:
    def register(function: CallRule) -> CallRule:
        CALLS[name] = function
        return function

    return register


def judge_call(step: Step, call: Call) -> SpmdType:
    """Type of the result of a wrapper call; calls without a rule are not followed."""
    x = step.type_at(0)
    if not step.is_own_group(call.group):
        # Among a part of the ranks: copy_to_tp makes a replicated tensor fit for varying work, the rest is unknown.
        return _enter(step, x) if call.name == "copy_to_tp" and x.kind == "I" else _kept_over_others(call, x)
    judge = CALLS.get(call.name)
    return UNKNOWN if judge is None or x.kind == "U" else judge(step, call, x)


def _kept_over_others(call: Call, x: SpmdType) -> SpmdType:
    return x if call.name == "copy_to_tp" else UNKNOWN


@_call("all_reduce")
def _all_reduce(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """Partial -> I or R, as `dst` says."""
    wrong = wrong_reduce(step, x, call.op or "sum")
    return wrong or SpmdType(_kind(call.dst), x.grad, origin=step.origin(f"all_reduce(dst={call.dst!r})"))


@_call("reduce_scatter_single")
def _reduce_scatter(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """Partial -> shard."""
    return wrong_reduce(step, x, call.op or "sum") or SpmdType("V", x.grad, call.dim)


@_call("all_gather_single")
def _all_gather(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """Shard -> I or R, as `dst` says."""
    return SpmdType(_kind(call.dst), x.grad, origin=step.origin(f"all_gather(dst={call.dst!r})"))


@_call("copy_to_tp")
def _copy_to_tp(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """I -> R; anything else has a gradient that must not be summed here."""
    if not step.differentiable or not x.grad or x.kind in ("I", "C"):
        return x if x.kind == "V" else _enter(step, x)
    made = "" if x.origin is None else f" (from {described(x.origin)})"
    wrong = "sums gradients of different values" if x.kind == "V" else "sums the gradient once more than needed"
    return step.flag(
        "double-copy",
        why=f"copy_to_tp of {x}{made}, which is inside the parallel region already: its backward {wrong}",
        fix="call copy_to_tp once per replicated tensor, where it enters the region",
    )


def _enter(step: Step, x: SpmdType) -> SpmdType:
    return SpmdType("R", x.grad, origin=step.origin("copy_to_tp")) if x.kind in ("I", "R") else x


@_call("scatter_single")
def _scatter(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """I (src='I') or R (src='R') -> shard, without communication."""
    if x.kind == "P":
        return used_as_whole(step, x, "takes this rank's part of it")
    if x.grad and x.is_whole and step.differentiable and x.kind != _kind(call.src):
        return step.flag(
            "wrong-src",
            why=f"scatter of {x} with src={call.src!r}: the gradient of {x} is "
            + ("not summed over the ranks" if x.kind == "I" else "summed again by the producer"),
            fix=f"pass src={x.kind!r}",
        )
    return SpmdType("V", x.grad, call.dim)


@_call("all_to_all_single")
def _all_to_all(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """A shard of something else, on a dim the call does not tell."""
    return UNKNOWN if x.kind == "P" else SpmdType("V", x.grad)


def wrong_reduce(step: Step, x: SpmdType, op: str) -> SpmdType | None:
    """Report a reduce of what is whole already, or with an op that does not fit the partial value."""
    if x.kind in ("I", "R") and op in _SUMS:
        made = "" if x.origin is None else f" since {described(x.origin)}"
        times = f"multiplies it by {step.world}" if op == "sum" else "is wasted"
        return step.flag(
            "double-reduce",
            why=f"the operand is {x}, whole on every rank{made}: a second reduce {times}",
            fix="reduce a partial sum once",
        )
    fitting = _FITS.get(x.op, ()) if x.kind == "P" else (op,)
    if op in fitting or (x.op in _SUMS and op in _SUMS):
        return None
    return step.flag(
        "wrong-reduce-op",
        why=f"the operand is a partial {x.op}, reduced with {op!r}",
        fix=f"reduce it with {' or '.join(fitting)}" if fitting else f"a partial {x.op} cannot be reduced; reduce sums",
    )


@rule("_c10d_functional.all_reduce")
def _functional_all_reduce(step: Step) -> Result:
    """torch's own all-reduce: its backward all-reduces, so the result is R."""
    if not step.is_own_group(step.args[2]) or step.type_at(0).kind == "U":
        return UNKNOWN
    x = step.type_at(0)
    wrong = wrong_reduce(step, x, step.args[1])
    return wrong or SpmdType("R", x.grad, origin=step.origin(step.name))


@rule("_c10d_functional.all_gather_into_tensor")
def _functional_all_gather(step: Step) -> Result:
    """torch's own all-gather: its backward reduce-scatters, so the result is R."""
    x = step.type_at(0)
    known = step.is_own_group(step.args[2]) and x.kind != "U"
    return SpmdType("R", x.grad, origin=step.origin("_c10d_functional.all_gather")) if known else UNKNOWN


@rule("_c10d_functional.reduce_scatter_tensor")
def _functional_reduce_scatter(step: Step) -> Result:
    """torch's own reduce-scatter, on dim 0."""
    x = step.type_at(0)
    if not step.is_own_group(step.args[3]) or x.kind == "U":
        return UNKNOWN
    return wrong_reduce(step, x, step.args[1]) or SpmdType("V", x.grad, 0)


@rule("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd")
def _waited(step: Step) -> Result:
    """The same value, arrived."""
    return step.type_at(0)


@rule("c10d.allreduce")
def _in_place_all_reduce(step: Step) -> Result:
    """`dist.all_reduce`: whole afterwards, but its gradient is stated nowhere."""
    results = [_reduced_in_place(step, step.type_of(tensor)) for tensor in tensors_in(step.args[0])]
    return results or UNKNOWN


def _reduced_in_place(step: Step, x: SpmdType) -> SpmdType:
    if x.kind == "U" or not step.is_own_group(step.args[1]):
        return UNKNOWN
    if x.kind in ("I", "R"):
        wrong = wrong_reduce(step, x, "sum")
        assert wrong is not None
        return wrong
    return _stated_nowhere(step) if x.grad and step.differentiable else SpmdType("I", origin=step.origin())


def _stated_nowhere(step: Step) -> SpmdType:
    return step.flag(
        "no-stated-gradient",
        why=f"{step.name} writes in place: eager autograd does not see it, and torch.compile rewrites it to an op "
        f"whose backward all-reduces, so the gradient differs by a factor of {step.world} between the two",
        fix="use tpcompile.collectives.api, which state the gradient: e.g. all_reduce(x, group=..., dst='I')",
    )


@rule("c10d._allgather_base", "c10d._reduce_scatter_base", "c10d.allgather", "c10d.broadcast", "c10d.reduce_scatter",
      "c10d.alltoall_base", "c10d.alltoall")  # fmt: skip
def _in_place(step: Step) -> Result:
    """Other in-place collectives: the output buffer is followed no further, its missing gradient is reported."""
    if step.differentiable and any(t.grad for _, t in step.operands()):
        _stated_nowhere(step)
    return UNKNOWN


def _kind(dst: str) -> Any:
    return dst if dst in ("I", "R") else "I"
