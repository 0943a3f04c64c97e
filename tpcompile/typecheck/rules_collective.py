"""Collective -> type of its result: calls of our wrappers, torch's functional ops, and in-place c10d ops."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from tpcompile.torch_api.dispatch import reduce_op_name
from tpcompile.typecheck import wording
from tpcompile.typecheck.ops import CHOICES, FUNCTIONAL, PARTIAL_OF, PRODUCTS
from tpcompile.typecheck.parameters import is_known_whole
from tpcompile.typecheck.rules_pointwise import used_as_whole
from tpcompile.typecheck.rules_scale import is_times_ranks, weighted
from tpcompile.typecheck.spmd import UNKNOWN, SpmdType
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
    """The type after a wrapper call over a group that is not the checked one; most calls are not followed.

    copy_to_tp over some of the ranks makes I fit for work that differs per rank. A sum over ranks of which only this
    one is in the checked group, as along a different mesh axis, leaves partial what is partial.
    """
    x = step.type_at(0)
    if step.name == "copy_to_tp":
        return _entered(step, x) if x.kind == "I" else replace(x, replicated_rows=None)
    if step.name != "all_reduce" or not x.is_partial_of(*_SUMS):
        return UNKNOWN
    members = set(dist.get_process_group_ranks(step.kwargs["group"]))
    own = set(dist.get_process_group_ranks(step.group))
    is_sum = step.kwargs["op"] in ("", *_SUMS)
    if not is_sum or len(members & own) != 1:
        return UNKNOWN
    return replace(x, origin=step.origin("all_reduce over a different group", maker="all_reduce"))


@rule("all_reduce")
def _all_reduce(step: Step) -> Result:
    """Partial -> I or R, as `dst` says."""
    x = step.type_at(0)
    dst = step.kwargs["dst"]
    origin = step.origin(f"all_reduce(dst={dst!r})", maker="all_reduce")
    return _reduced(step, x, step.kwargs["op"] or "sum", SpmdType(dst, x.grad, origin=origin))


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
    return _gathered(step, x, dim, SpmdType(dst, x.grad, origin=origin))


@rule("copy_to_tp")
def _copy_to_tp(step: Step) -> Result:
    """I -> R; every other kind has a gradient that must not be summed here."""
    x = step.type_at(0)
    if x.kind in ("I", "C") or not step.has_gradient(x):
        return _entered(step, x)
    effect = "sums a gradient that is summed already"
    if x.kind == "V":
        effect = "sums gradients of different values"
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
    if x.kind in ("I", "R") and x.kind != src and step.has_gradient(x):
        effect = {"I": "not summed over the ranks", "R": "summed again by the producer"}[x.kind]
        return step.flag(wording.WRONG_SRC, x=x, src=src, effect=effect)
    return SpmdType("V", x.grad, step.kwargs["dim"])


@rule("all_to_all_single")
def _all_to_all(step: Step) -> Result:
    """A shard of a different dim, which the call does not name."""
    x = step.type_at(0)
    if x.kind == "P":
        return UNKNOWN
    return SpmdType("V", x.grad)


@rule(*FUNCTIONAL)
def _functional(step: Step) -> Result:
    """torch's own collectives: all-reduce and all-gather sum in their backward, so their results are R.

    Over a different group the result is not followed.
    """
    x = step.type_at(0)
    is_scatter = step.name.endswith("reduce_scatter_tensor")
    group = step.args[3 if is_scatter else 2]
    if not step.is_own_group(group):
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
    results = [_reduced_in_place(step, step.type_of(tensor), op) for tensor in tensors_in(step.args[0])]
    return results or UNKNOWN


def _reduced_in_place(step: Step, x: SpmdType, op: str) -> SpmdType:
    if x.kind == "U" or not step.is_own_group(step.args[1]):
        return UNKNOWN
    reduced = SpmdType("I", origin=step.origin())
    loses_gradient = step.has_gradient(x)
    if x.is_whole or not loses_gradient:
        reduced = _reduced(step, x, op, reduced)
    is_wrong = reduced.kind == "U"  # one violation of an op is enough
    if is_wrong or not loses_gradient:
        return reduced
    return step.flag(wording.NO_STATED_GRADIENT)


@rule("c10d._allgather_base")
def _gathered_in_place(step: Step) -> Result:
    """`dist.all_gather_into_tensor` of what needs no gradient; not followed where blocks are stacked."""
    out, x = step.args[:2]
    type_ = step.type_of(x)
    is_joined = out.dim() == x.dim() and out.shape[0] == x.shape[0] * step.world
    if not is_joined or not _is_followed(step, type_):
        return _in_place(step)
    return _gathered(step, type_, 0, SpmdType("I", origin=step.origin(maker="all_gather")))


@rule("c10d._reduce_scatter_base")
def _scattered_in_place(step: Step) -> Result:
    """`dist.reduce_scatter_tensor` of what needs no gradient."""
    out, x = step.args[:2]
    type_ = step.type_of(x)
    is_joined = out.dim() == x.dim() and out.shape[0] * step.world == x.shape[0]
    if not is_joined or not _is_followed(step, type_):
        return _in_place(step)
    return wrong_reduce(step, type_, reduce_op_name(step.args[3])) or SpmdType("V", False, 0)


def _is_followed(step: Step, x: SpmdType) -> bool:
    """Over the checked group, and no gradient is lost."""
    has_gradient = step.differentiable and step.types.grad
    return step.is_own_group(step.args[2]) and not has_gradient and x.kind not in ("U", "C")


@rule("c10d.allgather", "c10d.broadcast", "c10d.reduce_scatter", "c10d.alltoall_base", "c10d.alltoall")
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
        kind, op = ("statistics", x.op) if is_statistic else ("summands", "")
        pending = step.pending(kind, wording.PARTIAL_GATHERED, x=x)
        pending = replace(pending, dim=dim, op=op)
    elif x.kind in ("I", "R"):
        if is_known_whole(step, x):
            pending = step.pending("gather", wording.DOUBLE_GATHER, x=x)
    elif x.is_known_shard and x.dim != dim:
        pending = step.pending("gather", wording.WRONG_GATHER_DIM, x=x, dim=dim)
        pending = replace(pending, dim=x.dim)
    return replace(whole, pending=pending)


def _reduced(step: Step, x: SpmdType, op: str, whole: SpmdType) -> SpmdType:
    """The type after a reduce over the ranks, `whole` where it is the right one."""
    wrong = wrong_reduce(step, x, op)
    if wrong is not None:
        return wrong
    if x.is_partial_of("mean") and op == "sum":
        return replace(whole, pending=step.pending("too-large", wording.SUM_OF_MEANS))
    is_product = x.is_partial_of("sum") and x.origin.what in PRODUCTS
    is_average = is_product and op == "avg"
    if not is_average or is_times_ranks(step, x):
        return whole
    factor = x.multiples.factor
    if factor is None:
        return UNKNOWN
    if abs(factor.value) > 1:  # it may have the number of ranks in it
        return UNKNOWN
    return replace(whole, pending=step.pending("too-small", wording.AVERAGE_OF_SUMS))


def wrong_reduce(step: Step, x: SpmdType, op: str) -> SpmdType | None:
    """Report a reduce of what is whole or a shard, or with an op that does not fit the partial value."""
    if x.kind == "P":
        return _wrong_op(step, x, op)
    if x.origin.what in CHOICES:
        return UNKNOWN  # what a rank chose in its block is merged by choosing once more
    if op not in _SUMS:
        return None
    if x.kind in ("I", "R"):
        return _double_reduce(step, x, op) if is_known_whole(step, x) else None
    if x.is_masked:
        return None
    if x.is_lookup:
        return step.flag(wording.LOOKUP_ADDED)
    return step.flag(wording.SHARDS_ADDED, x=x) if x.is_known_shard else None


def _wrong_op(step: Step, x: SpmdType, op: str) -> SpmdType | None:
    fitting = _FITS.get(x.op, ())
    accepted = {*fitting, *_SUMS} if x.op in _SUMS else set(fitting)
    if op in accepted:
        return None
    advice = "reduce sums"
    if fitting:
        advice = f"reduce it with {' or '.join(fitting)}"
    return step.flag(wording.WRONG_REDUCE_OP, x=x, given=op, advice=advice)


def _double_reduce(step: Step, x: SpmdType, op: str) -> SpmdType | None:
    """Report a sum of what is whole, unless each rank adds a share of it; an average divides what it adds."""
    weight = {"avg": 1 / step.world, "sum": 1}[op]
    share = weighted(step, x, weight)
    is_of_shares = all(term.is_share for term in summands(share, step.world))
    if is_of_shares:
        return wrong_summand(step, share, added="is reduced", fix="reduce a partial sum once")
    return step.flag(wording.DOUBLE_REDUCE, x=x)
