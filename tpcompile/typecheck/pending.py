"""A value that is right on its rank only, and the op that reads it -> carried on, completed, or a violation.

kind     made by                                  completed by
scan     a running sum along the sharded dim      adding what the ranks before it have
product  exp of a scan                            multiplying by it
halo     roll, flip, convolution along the shard  writing the elements of the neighbour, or cutting the border off
shift    minus the local maximum; local softmax   multiplying by the rank's own weight, as a log-sum-exp merge does
moment   minus the local mean                     squares, summed, plus those of the gathered means
factor   a sum of local means, a mean of sums     dividing, or multiplying, by the number of ranks
gather   blocks that do not lie side by side      taking them apart again (not followed further)
summands the ranks' partial sums, gathered        adding them up
statistics  a statistic of each rank's block, gathered  reducing or choosing along them; work on each alone
blocks   gathered blocks, taken apart             joining along the sharded dim; adding up partial ones

Each use that neither carries nor completes it is reported at the op that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

from tpcompile.typecheck.ops import SAME_VALUE, VIEWS
from tpcompile.typecheck.rules_reduce import CHOICES, PARTIAL_OF, reduced_dims, reduction_of
from tpcompile.typecheck.rules_scale import multiplier
from tpcompile.typecheck.scale import is_close
from tpcompile.typecheck.spmd import UNKNOWN, Pending, SpmdType, Types
from tpcompile.typecheck.step import Result, Step

Judge = Callable[[Step], Result]
_APART = {"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.select"}
_CUTS = {"aten.slice", "aten.narrow", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.select"}
_SUMS = {"aten.add", "aten.sub", "aten.rsub"}
_SCALES = {"aten.mul", "aten.div", "aten.true_divide"}
_PRODUCTS = {"aten.mm", "aten.bmm", "aten.mv"}
_LINEAR = {*VIEWS, *_PRODUCTS, *_SCALES, "aten.sum", "aten.exp", "aten.native_dropout"}
_GATHERS = {"all_gather_single", "_c10d_functional.all_gather_into_tensor"}
_REDUCES = {"all_reduce", "reduce_scatter_single", "_c10d_functional.all_reduce"}
_PACKS = {"aten.cat", "aten.stack"}
"""Side by side with the statistic that a local value is merged by."""
_LEAVES_SHIFT = {"aten.log", "aten.reciprocal", *_PACKS}
_OF_SQUARES = {*VIEWS, *_GATHERS, *_REDUCES, "aten.pow", "aten.sum", "aten.mean"}
_GATHERED = ("gather", "summands", "statistics")
_WRITES = {"aten.copy", "aten.where", "aten.index_put", "aten.slice_scatter"}
_PROBES = {"aten.isnan", "aten.isinf", "aten.isfinite", "aten.eq", "aten.ne"}

CARRIED, COMPLETED, LOST, WRONG = "carried", "completed", "lost", "wrong"


def pending_of(step: Step) -> Pending | None:
    """The first pending value that the op reads."""
    found = [type_.pending for type_ in step.types if type_.pending is not None]
    return found[0] if found else None


def judge_pending(step: Step, pending: Pending, judge: Judge) -> Result:
    """Types of the results of an op that reads a pending value; `judge` gives them for the value as it stands."""
    outcome = _outcome(step, pending)
    if outcome == WRONG:
        return step.all_results(step.flag_pending(pending))
    if outcome == LOST:
        return step.all_results(UNKNOWN)
    plain = replace(step, type_of=lambda tensor: replace(step.type_of(tensor), pending=None))
    result = judge(plain)
    if outcome == COMPLETED:
        return result
    carried = _next(step, pending)
    types = [
        type_ if type_.kind in ("U", "C") else replace(type_, pending=carried)
        for type_ in ([result] if isinstance(result, SpmdType) else result)
    ]
    return types[0] if isinstance(result, SpmdType) else types


def _outcome(step: Step, pending: Pending) -> str:
    if step.name in SAME_VALUE:
        return CARRIED
    is_torchs = step.name.startswith(("aten.", "_c10d_functional."))
    is_custom = not is_torchs and step.name not in _OF_CALLS
    if is_custom or step.name in _PROBES:
        return LOST
    follow = OUTCOMES[pending.kind]
    return follow(step, pending)


_OF_CALLS = ("all_reduce", "all_gather_single", "reduce_scatter_single", "copy_to_tp", "scatter_single")
"""Wrappers that take the value for one of the whole tensor; any other call may bring it where it belongs."""


def _next(step: Step, pending: Pending) -> Pending:
    """The pending value after an op that carries it."""
    if pending.kind == "scan" and step.name == "aten.exp":
        return replace(pending, kind="product")
    if pending.kind == "blocks" and step.name == "aten.cat":
        joined = replace(pending, dim=_joined_at(step))
        return replace(joined, kind="statistics" if pending.op else "summands")
    if pending.kind not in _GATHERED:
        return pending
    if step.name in _APART:
        return replace(pending, kind="blocks")
    if step.name not in VIEWS:
        return pending
    is_reshaped = step.out.shape != step.args[0].shape
    if is_reshaped:
        return replace(pending, dim=None)
    return pending


def _others(step: Step) -> Types:
    """Types of the operands that are not pending."""
    return Types(type_ for type_ in step.types if type_.pending is None)


def _has_own_value(step: Step) -> bool:
    """True when an operand differs per rank on no known dim, as what a rank knows of itself or of the ranks before."""
    return any(map(_is_own, _others(step)))


def _is_own(type_: SpmdType) -> bool:
    if type_.kind in ("I", "R"):
        return type_.maker == "all_gather"
    has_no_dim = type_.kind == "V" and type_.dim is None
    return has_no_dim or type_.kind == "U"


def _carried_by(step: Step, ops: Set[str]) -> str:
    return CARRIED if step.name in ops else WRONG


def _scan(step: Step, pending: Pending) -> str:
    if step.name in _SUMS and _has_own_value(step):
        return COMPLETED
    carrying = {*VIEWS, "aten.neg", "aten.exp"}
    if all(type_.is_whole for type_ in _others(step)):
        carrying |= _SCALES
    return _scanned_by(step, carrying)


def _scanned_by(step: Step, ops: Set[str]) -> str:
    """As `_carried_by`; the last place is the total of the shard, which other ranks may need."""
    if _takes_last(step):
        return LOST
    return _carried_by(step, ops)


_CUTS_AT = {"aten.slice": "start", "aten.narrow": "start", "aten.select": "index"}


def _takes_last(step: Step) -> bool:
    """True when the op takes the last place along the sharded dim, and no other."""
    x, shard = step.args[0], step.type_at(0)
    argument = _CUTS_AT.get(step.name)
    if argument is None:
        return False
    dim = step.arg(1, "dim", 0) % x.dim()
    start = step.arg(2, argument, 0)
    is_last = start in (-1, x.shape[dim] - 1)
    return is_last and dim == shard.dim


def _product(step: Step, pending: Pending) -> str:
    if step.name == "aten.mul" and _has_own_value(step):
        return COMPLETED
    return _scanned_by(step, VIEWS)


def _halo(step: Step, pending: Pending) -> str:
    if step.name in _WRITES:
        return COMPLETED
    if step.name not in _CUTS or pending.dim is None:
        return _carried_by(step, VIEWS)
    shape = step.args[0].shape
    is_cut = all(part.shape != shape for part in step.results)
    if is_cut:
        return COMPLETED
    return CARRIED


def _shift(step: Step, pending: Pending) -> str:
    kinds = _others(step).kinds | _kinds(step)
    if step.name in ("aten.mul", "aten.div") and _has_own_value(step):
        return COMPLETED
    if step.name in _LEAVES_SHIFT:
        return LOST
    is_combining = step.name in _SUMS | _SCALES
    if is_combining and "P" in kinds:
        return LOST
    return _carried_by(step, _LINEAR | _GATHERS)


def _moment(step: Step, pending: Pending) -> str:
    """Squares around the mean of the shard, which the squares of the gathered means around the global one complete."""
    if step.name in _SUMS and _has_own_value(step):
        return COMPLETED
    if step.name in _PACKS:
        return LOST
    carrying = _OF_SQUARES
    if all(type_.is_whole for type_ in _others(step)):
        carrying = carrying | _SCALES
    return _carried_by(step, carrying)


def _kinds(step: Step) -> set[Any]:
    """Kinds of the operands where more than one is pending."""
    pending = [type_ for type_ in step.types if type_.pending is not None]
    return {type_.kind for type_ in pending} if len(pending) > 1 else set()


def _factor(step: Step, pending: Pending) -> str:
    """`dim` is 1 for a value that is too large by the number of ranks, -1 for one that is too small."""
    scale = None
    if step.name in _SCALES:
        scale = multiplier(step)
    if scale is None:
        return _carried_by(step, {*VIEWS, "aten.neg"})
    wanted = 1 / step.world if pending.dim == 1 else step.world
    if is_close(scale, wanted):
        return COMPLETED
    return CARRIED


def _gather(step: Step, pending: Pending) -> str:
    """A view with more dims takes the blocks apart, a mask may choose among them."""
    if step.name in _APART:
        return CARRIED
    if _has_own_value(step):
        return LOST
    if step.name not in VIEWS - _CUTS:
        return WRONG
    has_more_dims = step.out.dim() > step.args[0].dim()
    if has_more_dims:
        return LOST
    return CARRIED


def _summands(step: Step, pending: Pending) -> str:
    """As `_gather`; a sum over the blocks, one of each rank, is the reduce."""
    if step.name == "aten.neg":
        return CARRIED
    if step.name in _SCALES and multiplier(step) is not None:
        return CARRIED
    if step.name not in PARTIAL_OF:
        return _gather(step, pending)
    is_sum = step.name == "aten.sum"
    if not is_sum or not _is_along(step, pending):
        return LOST
    num_blocks = step.args[0].shape[pending.dim]
    if num_blocks == step.world:
        return COMPLETED
    return LOST


def _statistics(step: Step, pending: Pending) -> str:
    """What one rank's block may be is not a question of types, so nothing is reported."""
    if step.is_pointwise:
        return COMPLETED
    fits = step.name in CHOICES or reduction_of(step) == pending.op
    if fits and _is_along(step, pending):
        return COMPLETED
    keeping = VIEWS - _CUTS | _APART
    if step.name in keeping:
        return CARRIED
    return LOST


def _is_along(step: Step, pending: Pending) -> bool:
    """True when a reduction or choice is along the dim of the blocks."""
    is_elementwise = len(step.operands()) > 1  # as torch.max(x, y)
    return not is_elementwise and pending.dim in reduced_dims(step, step.args[0])


def _blocks(step: Step, pending: Pending) -> str:
    if step.name != "aten.cat":
        return LOST
    if pending.rule == "partial-used-as-whole":
        return CARRIED
    if pending.rule == "wrong-gather-dim" and pending.dim is None:
        return LOST
    is_in_place = _joined_at(step) == pending.dim
    if is_in_place:
        return COMPLETED
    return WRONG


def _joined_at(step: Step) -> int:
    dim: int = step.arg(1, "dim", 0)
    return dim % step.args[0][0].dim()


OUTCOMES: dict[str, Callable[[Step, Pending], str]] = {
    "scan": _scan,
    "product": _product,
    "halo": _halo,
    "shift": _shift,
    "moment": _moment,
    "factor": _factor,
    "gather": _gather,
    "summands": _summands,
    "statistics": _statistics,
    "blocks": _blocks,
}
