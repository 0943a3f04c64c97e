"""Collective -> type of its result: calls of our wrappers, torch's functional ops, and in-place c10d ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tpcompile.collectives.observer import Call
from tpcompile.torch_api.dispatch import reduce_op_name
from tpcompile.typecheck.pending import judge_pending
from tpcompile.typecheck.rules_matmul import PRODUCTS
from tpcompile.typecheck.rules_pointwise import used_as_whole
from tpcompile.typecheck.rules_reduce import CHOICES, PARTIAL_OF
from tpcompile.typecheck.rules_scale import is_times_ranks, weighted
from tpcompile.typecheck.spmd import UNKNOWN, Pending, SpmdType
from tpcompile.typecheck.step import Result, Step, rule, tensors_in
from tpcompile.typecheck.summand import summands, wrong_summand

_FITS = {
    "sum": ("sum",),
    "mean": ("sum", "avg"),
    "max": ("max",),
    "min": ("min",),
    "product": ("product",),
    "logsumexp": ("max",),
    "norm0": ("sum",),
    "norm1": ("sum",),
    "norminf": ("max",),
    "norm-inf": ("min",),
}
_SUMS = ("sum", "avg")
CallRule = Callable[[Step, Call, SpmdType], SpmdType]


def judge_call(step: Step, call: Call) -> SpmdType:
    """Type of the result of a wrapper call; calls without a rule are not followed."""
    x = step.type_at(0)
    if not step.is_own_group(call.group):
        return _over_different_group(step, call, x)
    if x.kind == "U":
        return UNKNOWN
    judge = CALLS.get(call.name, lambda *_: UNKNOWN)
    if x.pending is None:
        return judge(step, call, x)
    found = judge_pending(step, x.pending, lambda plain: judge(plain, call, plain.type_at(0)))
    return found if isinstance(found, SpmdType) else found[0]


def _over_different_group(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """Over some of the ranks, copy_to_tp makes I fit for work that differs per rank; other calls are not followed.

    But for a sum over ranks of which only this one is in the checked group, as along a different mesh axis: what is
    partial stays partial.
    """
    if call.name == "copy_to_tp" and x.kind == "I":
        return _enter(step, x)
    if call.name == "copy_to_tp":
        return replace(x, replicated_rows=None)
    is_sum = call.name == "all_reduce" and (call.op or "sum") in _SUMS
    is_across = x.is_partial_of(*_SUMS) and step.is_across(call.group)
    if is_sum and is_across:
        return replace(x, origin=step.origin("all_reduce over a different group", maker="all_reduce"))
    return UNKNOWN


def _all_reduce(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """Partial -> I or R, as `dst` says."""
    origin = step.origin(f"all_reduce(dst={call.dst!r})", maker="all_reduce")
    whole = SpmdType(_kind(call.dst), x.grad, origin=origin)
    return _all_reduced(step, x, call.op or "sum", whole)


def _reduce_scatter(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """Partial -> shard."""
    return wrong_reduce(step, x, call.op or "sum") or SpmdType("V", x.grad, call.dim)


def _all_gather(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """Shard -> I or R, as `dst` says."""
    assert call.dim is not None
    origin = step.origin(f"all_gather(dst={call.dst!r})", maker="all_gather")
    whole = SpmdType(_kind(call.dst), x.grad, origin=origin)
    return _gathered(step, x, call.dim % step.args[0].dim(), whole)


def _copy_to_tp(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """I -> R; every other kind has a gradient that must not be summed here."""
    can_enter = x.kind in ("I", "C") or not step.has_gradient(x)
    if can_enter:
        return _enter(step, x)
    made = x.made(" (from {})")
    wrong = "sums gradients of different values" if x.kind == "V" else "sums a gradient that is summed already"
    return step.flag(
        "double-copy",
        why=f"copy_to_tp of {x}{made}, which is inside the parallel region already: its backward {wrong}",
        fix="call copy_to_tp once per replicated tensor, where it enters the region",
    )


def _enter(step: Step, x: SpmdType) -> SpmdType:
    """I or R -> R; a type of any other kind stays."""
    if x.kind not in ("I", "R"):
        return x
    return SpmdType("R", x.grad, scale=x.scale, origin=step.origin("copy_to_tp"))


def _scatter(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """I (src='I') or R (src='R') -> shard, without communication."""
    if x.kind == "P":
        return used_as_whole(step, x, "takes this rank's part of it")
    has_src = x.kind == _kind(call.src)
    if x.is_whole and not has_src and step.has_gradient(x):
        effect = "not summed over the ranks" if x.kind == "I" else "summed again by the producer"
        return step.flag(
            "wrong-src",
            why=f"scatter of {x} with src={call.src!r}: the gradient of {x} is {effect}",
            fix=f"pass src={x.kind!r}",
        )
    return SpmdType("V", x.grad, call.dim)


def _all_to_all(step: Step, call: Call, x: SpmdType) -> SpmdType:
    """A shard of a different dim, which the call does not name."""
    return UNKNOWN if x.kind == "P" else SpmdType("V", x.grad)


def _gathered(step: Step, x: SpmdType, dim: int, whole: SpmdType) -> SpmdType:
    """The type after a gather along `dim`; blocks that do not lie side by side there may still be taken apart."""
    pending = None
    if x.kind == "P":
        pending = _blocks_of_partial(step, x, dim)
    elif x.kind in ("I", "R"):
        pending = step.pending(
            "gather",
            "double-gather",
            why=f"all_gather of {x}, which is whole on every rank{x.made(' since {}')}: the result has {step.world} "
            "copies",
            fix="leave the gather out, or gather the shard",
        )
    elif x.is_known_shard and x.dim != dim:
        pending = step.pending(
            "gather",
            "wrong-gather-dim",
            why=f"the operand is sharded on dim {x.dim}, and all_gather joins the shards along dim {dim}",
            fix=f"gather along dim {x.dim}",
            dim=x.dim,
        )
    return replace(whole, pending=pending)


def _blocks_of_partial(step: Step, x: SpmdType, dim: int) -> Pending:
    """Gathered statistics, such as maxima, are values of their own to choose from; summands of a product are not."""
    is_statistic = x.op not in ("sum", "absolute") or x.made_by in PARTIAL_OF
    kind, op = ("statistics", x.op) if is_statistic else ("summands", "")
    return step.pending(
        kind,
        "partial-used-as-whole",
        why=f"all_gather puts partial values (P{x.made(', made by {}')}) side by side: every block is the summand "
        "of one rank",
        fix="all_reduce a partial sum, or reduce_scatter it",
        dim=dim,
        op=op,
    )


def _all_reduced(step: Step, x: SpmdType, op: str, whole: SpmdType) -> SpmdType:
    wrong = wrong_reduce(step, x, op)
    if wrong is not None:
        return wrong
    if x.is_partial_of("mean") and op == "sum":
        return replace(whole, pending=_factor(step, 1, f"a sum of local means: {step.world} times the mean"))
    is_product = x.is_partial_of("sum") and x.made_by in PRODUCTS
    return _averaged(step, x, whole) if is_product and op == "avg" else whole


def _averaged(step: Step, x: SpmdType, whole: SpmdType) -> SpmdType:
    """The sum, where each rank multiplied its part by the number of ranks; numbers above 1 may have that in them."""
    if is_times_ranks(step, x):
        return whole
    factor = x.multiples.factor
    is_unclear = factor is None or abs(factor.value) > 1
    if is_unclear:
        return UNKNOWN
    pending = _factor(step, -1, f"an average of partial sums: 1 / {step.world} of the sum")
    return replace(whole, pending=pending)


def _factor(step: Step, power: int, what: str) -> Pending:
    scale = "divide it by" if power == 1 else "multiply it by"
    other = "avg" if power == 1 else "sum"
    return step.pending(
        "factor",
        "wrong-reduce-op",
        why=f"the result is {what}",
        fix=f"reduce it with op={other!r}, or {scale} the number of ranks before it is used",
        dim=power,
    )


def wrong_reduce(step: Step, x: SpmdType, op: str) -> SpmdType | None:
    """Report a reduce of what is whole or a shard, or with an op that does not fit the partial value."""
    if x.kind == "P":
        return _wrong_op(step, x, op)
    if x.made_by in CHOICES:
        return UNKNOWN  # what a rank chose in its block is merged by choosing once more
    if op not in _SUMS:
        return None
    if x.kind in ("I", "R"):
        return _double_reduce(step, x, op)
    if not x.is_known_shard or x.is_masked:
        return None
    return step.flag(
        "shards-added",
        why=f"the operand is a shard ({x}): a sum over the ranks adds up elements of different places",
        fix="all_gather the shard; or reduce the partial result of the op that contracts the sharded dim",
    )


def _wrong_op(step: Step, x: SpmdType, op: str) -> SpmdType | None:
    fitting = _FITS.get(x.op, ())
    accepted = {*fitting, *_SUMS} if x.op in _SUMS else {*fitting}
    if op in accepted:
        return None
    advice = f"reduce it with {' or '.join(fitting)}"
    return step.flag(
        "wrong-reduce-op",
        why=f"the operand is a partial {x.op}, reduced with {op!r}",
        fix=advice if fitting else "reduce sums",
    )


def _double_reduce(step: Step, x: SpmdType, op: str) -> SpmdType | None:
    """Report a sum of what is whole, unless each rank adds a share of it; an average divides what it adds."""
    share = weighted(step, x, 1 / step.world) if op == "avg" else x
    terms = summands(share, step.world)
    is_of_shares = all(term.is_share for term in terms)
    if is_of_shares:
        return wrong_summand(step, share, added="is reduced", fix="reduce a partial sum once")
    made = x.made(" since {}")
    return step.flag(
        "double-reduce",
        why=f"the operand is {x}, whole on every rank{made}: a second reduce multiplies it by {step.world}",
        fix="reduce a partial sum once",
    )


@rule(
    "_c10d_functional.all_reduce", "_c10d_functional.all_gather_into_tensor", "_c10d_functional.reduce_scatter_tensor"
)
def _functional(step: Step) -> Result:
    """torch's own collectives: all-reduce and all-gather sum in their backward, so their results are R.

    Over a different group, or with an operand that is not followed, the result is not followed.
    """
    x = step.type_at(0)
    is_scatter = step.name.endswith("reduce_scatter_tensor")
    group = step.args[3 if is_scatter else 2]
    if x.kind == "U" or not step.is_own_group(group):
        return UNKNOWN
    if is_scatter:
        return wrong_reduce(step, x, step.args[1]) or SpmdType("V", x.grad, 0)
    if step.name.endswith("all_reduce"):
        whole = SpmdType("R", x.grad, origin=step.origin(maker="all_reduce"))
        return _all_reduced(step, x, step.args[1], whole)
    origin = step.origin("_c10d_functional.all_gather", maker="all_gather")
    return _gathered(step, x, 0, SpmdType("R", x.grad, origin=origin))


@rule("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd")
def _waited(step: Step) -> Result:
    """The same value, after its collective has finished."""
    return step.type_at(0)


@rule("c10d.allreduce")
def _in_place_all_reduce(step: Step) -> Result:
    """`dist.all_reduce`: whole afterwards, but it states no gradient."""
    op = reduce_op_name(step.args[2])
    results = [_reduced_in_place(step, step.type_of(tensor), op) for tensor in tensors_in(step.args[0])]
    return results or UNKNOWN


def _reduced_in_place(step: Step, x: SpmdType, op: str) -> SpmdType:
    if x.kind == "U" or not step.is_own_group(step.args[1]):
        return UNKNOWN
    if step.has_gradient(x) and not x.is_whole:
        return _no_stated_gradient(step)
    reduced = _all_reduced(step, x, op, SpmdType("I", origin=step.origin()))
    is_right = reduced.kind != "U"
    return _no_stated_gradient(step) if is_right and step.has_gradient(x) else reduced


def _no_stated_gradient(step: Step) -> SpmdType:
    return step.flag(
        "no-stated-gradient",
        why=f"{step.name} writes in place: eager autograd does not see it, and torch.compile rewrites it to an op "
        f"whose backward all-reduces, so the gradient differs by a factor of {step.world} between the two",
        fix="use tpcompile.collectives, which state the gradient: e.g. all_reduce(x, group=..., dst='I')",
    )


@rule("c10d._allgather_base", "c10d._reduce_scatter_base", "c10d.allgather", "c10d.broadcast", "c10d.reduce_scatter",
      "c10d.alltoall_base", "c10d.alltoall")  # fmt: skip
def _in_place(step: Step) -> Result:
    """Other in-place collectives: the output buffer is not followed, a gradient that it needs is reported."""
    if step.differentiable and step.types.grad:
        _no_stated_gradient(step)
    return UNKNOWN


def _kind(dst: str) -> Any:
    return dst if dst in ("I", "R") else "I"


CALLS: dict[str, CallRule] = {
    "all_reduce": _all_reduce,
    "reduce_scatter_single": _reduce_scatter,
    "all_gather_single": _all_gather,
    "copy_to_tp": _copy_to_tp,
    "scatter_single": _scatter,
    "all_to_all_single": _all_to_all,
}
"""Name of a wrapper -> the rule of its calls."""
