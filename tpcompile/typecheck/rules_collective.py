"""Collective -> type of its result: calls of our wrappers, torch's functional ops, and in-place c10d ops."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from tpcompile.torch_api.dispatch import reduce_op_name
from tpcompile.typecheck import wording
from tpcompile.typecheck.ops import CHOICES, FUNCTIONAL, PARTIAL_OF, PRODUCTS
from tpcompile.typecheck.rules_pointwise import used_as_whole
from tpcompile.typecheck.rules_scale import is_times_ranks, weighted
from tpcompile.typecheck.spmd import UNKNOWN, Kind, Pending, SpmdType
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
"""Partial value -> the reduce ops that may make it whole."""
_SUMS = ("sum", "avg")


def over_different_group(step: Step) -> SpmdType:
    """Over some of the ranks, copy_to_tp makes I fit for work that differs per rank; other calls are not followed.

    But for a sum over ranks of which only this one is in the checked group, as along a different mesh axis: what is
    partial stays partial.
    """
    x = step.type_at(0)
    if step.name == "copy_to_tp":
        return _entered(step, x) if x.kind == "I" else replace(x, replicated_rows=None)
    is_sum = step.name == "all_reduce" and (step.kwargs["op"] or "sum") in _SUMS
    if not is_sum or not x.is_partial_of(*_SUMS):
        return UNKNOWN
    members, own = (set(dist.get_process_group_ranks(each)) for each in (step.kwargs["group"], step.group))
    if len(members & own) != 1:
        return UNKNOWN
    return replace(x, origin=step.origin("all_reduce over a different group", maker="all_reduce"))


def _kind(declared: str) -> Kind:
    return "R" if declared == "R" else "I"


@rule("all_reduce")
def _all_reduce(step: Step) -> Result:
    """Partial -> I or R, as `dst` says."""
    x, dst = step.type_at(0), step.kwargs["dst"]
    origin = step.origin(f"all_reduce(dst={dst!r})", maker="all_reduce")
    return _reduced(step, x, step.kwargs["op"] or "sum", SpmdType(_kind(dst), x.grad, origin=origin))


@rule("reduce_scatter_single")
def _reduce_scatter(step: Step) -> Result:
    """Partial -> shard."""
    x = step.type_at(0)
    return wrong_reduce(step, x, step.kwargs["op"] or "sum") or SpmdType("V", x.grad, step.kwargs["dim"])


@rule("all_gather_single")
def _all_gather(step: Step) -> Result:
    """Shard -> I or R, as `dst` says."""
    x, dst = step.type_at(0), step.kwargs["dst"]
    origin = step.origin(f"all_gather(dst={dst!r})", maker="all_gather")
    dim = step.kwargs["dim"] % step.args[0].dim()
    return _gathered(step, x, dim, SpmdType(_kind(dst), x.grad, origin=origin))


@rule("copy_to_tp")
def _copy_to_tp(step: Step) -> Result:
    """I -> R; every other kind has a gradient that must not be summed here."""
    x = step.type_at(0)
    if x.kind in ("I", "C") or not step.has_gradient(x):
        return _entered(step, x)
    effect = "sums gradients of different values" if x.kind == "V" else "sums a gradient that is summed already"
    return step.flag(wording.DOUBLE_COPY, x=x, effect=effect)


def _entered(step: Step, x: SpmdType) -> SpmdType:
    """I or R -> R; a type of any other kind stays."""
    if x.kind not in ("I", "R"):
        return x
    return SpmdType("R", x.grad, scale=x.scale, origin=step.origin())


@rule("scatter_single")
def _scatter(step: Step) -> Result:
    """I (src='I') or R (src='R') -> shard, without communication."""
    x, src = step.type_at(0), step.kwargs["src"]
    if x.kind == "P":
        return used_as_whole(step, x, "takes this rank's part of it")
    has_src = x.kind == _kind(src)
    if x.is_whole and not has_src and step.has_gradient(x):
        effect = "not summed over the ranks" if x.kind == "I" else "summed again by the producer"
        return step.flag(wording.WRONG_SRC, x=x, src=src, effect=effect)
    return SpmdType("V", x.grad, step.kwargs["dim"])


@rule("all_to_all_single")
def _all_to_all(step: Step) -> Result:
    """A shard of a different dim, which the call does not name."""
    x = step.type_at(0)
    return UNKNOWN if x.kind == "P" else SpmdType("V", x.grad)


@rule(*FUNCTIONAL)
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
        return _reduced(step, x, step.args[1], whole)
    origin = step.origin("_c10d_functional.all_gather", maker="all_gather")
    return _gathered(step, x, 0, SpmdType("R", x.grad, origin=origin))


@rule("c10d.allreduce")
def _in_place_all_reduce(step: Step) -> Result:
    """`dist.all_reduce`: whole afterwards, but it states no gradient."""
    op = reduce_op_name(step.args[2])
    results = []
    for tensor in tensors_in(step.args[0]):
        x = step.type_of(tensor)
        reduced = UNKNOWN
        if x.kind != "U" and step.is_own_group(step.args[1]):
            loses_gradient = step.has_gradient(x)
            if x.is_whole or not loses_gradient:
                reduced = _reduced(step, x, op, SpmdType("I", origin=step.origin()))
                loses_gradient = loses_gradient and reduced.kind != "U"  # one violation of an op is enough
            if loses_gradient:
                reduced = step.flag(wording.NO_STATED_GRADIENT)
        results.append(reduced)
    return results or UNKNOWN


@rule("c10d._allgather_base", "c10d._reduce_scatter_base", "c10d.allgather", "c10d.broadcast", "c10d.reduce_scatter",
      "c10d.alltoall_base", "c10d.alltoall")  # fmt: skip
def _in_place(step: Step) -> Result:
    """Other in-place collectives: the output buffer is not followed, a gradient that it needs is reported."""
    if step.differentiable and step.types.grad:
        step.flag(wording.NO_STATED_GRADIENT)
    return UNKNOWN


def _gathered(step: Step, x: SpmdType, dim: int, whole: SpmdType) -> SpmdType:
    """The type after a gather along `dim`; blocks that do not lie side by side there may still be taken apart."""
    pending = None
    if x.kind == "P":
        # Gathered statistics, such as maxima, are values of their own to choose from; summands of a product are not.
        is_statistic = x.op not in ("sum", "absolute") or x.origin.what in PARTIAL_OF
        blocks = step.pending("statistics" if is_statistic else "summands", wording.PARTIAL_GATHERED, x=x)
        pending = replace(blocks, dim=dim, op=x.op if is_statistic else "")
    elif x.kind in ("I", "R"):
        pending = step.pending("gather", wording.DOUBLE_GATHER, x=x)
    elif x.is_known_shard and x.dim != dim:
        pending = replace(step.pending("gather", wording.WRONG_GATHER_DIM, x=x, dim=dim), dim=x.dim)
    return replace(whole, pending=pending)


def _reduced(step: Step, x: SpmdType, op: str, whole: SpmdType) -> SpmdType:
    """The type after a reduce over the ranks, `whole` where it is the right one."""
    wrong = wrong_reduce(step, x, op)
    if wrong is not None:
        return wrong
    pending: Pending | None = None
    if x.is_partial_of("mean") and op == "sum":
        pending = step.pending("too-large", wording.SUM_OF_MEANS)
    is_average_of_products = x.is_partial_of("sum") and x.origin.what in PRODUCTS and op == "avg"
    if is_average_of_products and not is_times_ranks(step, x):
        factor = x.multiples.factor
        if factor is None or abs(factor.value) > 1:  # it may have the number of ranks in it
            return UNKNOWN
        pending = step.pending("too-small", wording.AVERAGE_OF_SUMS)
    return replace(whole, pending=pending)


def wrong_reduce(step: Step, x: SpmdType, op: str) -> SpmdType | None:
    """Report a reduce of what is whole or a shard, or with an op that does not fit the partial value."""
    if x.kind == "P":
        fitting = _FITS.get(x.op, ())
        if op in fitting or (op in _SUMS and x.op in _SUMS):
            return None
        advice = f"reduce it with {' or '.join(fitting)}" if fitting else "reduce sums"
        return step.flag(wording.WRONG_REDUCE_OP, x=x, given=op, advice=advice)
    if x.origin.what in CHOICES:
        return UNKNOWN  # what a rank chose in its block is merged by choosing once more
    if op not in _SUMS:
        return None
    if x.kind in ("I", "R"):
        return _double_reduce(step, x, op)
    if not x.is_known_shard or x.is_masked:
        return None
    return step.flag(wording.SHARDS_ADDED, x=x)


def _double_reduce(step: Step, x: SpmdType, op: str) -> SpmdType | None:
    """Report a sum of what is whole, unless each rank adds a share of it; an average divides what it adds."""
    share = weighted(step, x, 1 / step.world) if op == "avg" else x
    is_of_shares = all(term.is_share for term in summands(share, step.world))
    if is_of_shares:
        return wrong_summand(step, share, added="is reduced", fix="reduce a partial sum once")
    return step.flag(wording.DOUBLE_REDUCE, x=x)
