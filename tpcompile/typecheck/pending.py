"""A value that is right on its rank only, and the op that reads it -> carried on, completed, or a violation.

kind     made by                                  completed by
scan     a running sum along the sharded dim      adding what the ranks before it have
product  exp of a scan                            multiplying by it
halo     roll, flip, convolution along the shard  writing the elements of the neighbour, or cutting the border off
shift    minus the local maximum; local softmax   multiplying by the rank's own weight, as a log-sum-exp merge does
moment   minus the local mean                     squares, summed, plus those of the gathered means
too-large, too-small  a sum of local means, a mean of sums  dividing, or multiplying, by the number of ranks
gather   blocks that do not lie side by side      taking them apart again (not followed further)
summands the ranks' partial sums, gathered        adding them up
statistics  a statistic of each rank's block, gathered  reducing or choosing along them; work on each alone
blocks   gathered blocks, taken apart             joining along the sharded dim; adding up partial ones

Each use that neither carries nor completes it is reported at the op that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from tpcompile.typecheck.ops import CHOICES, PACKS, PARTIAL_OF, SAME_VALUE, SCALINGS, SUMS, VIEWS
from tpcompile.typecheck.rules_reduce import reduced_dims, reduction_of
from tpcompile.typecheck.rules_scale import multiplier
from tpcompile.typecheck.scale import is_close
from tpcompile.typecheck.spmd import UNKNOWN, Pending, SpmdType
from tpcompile.typecheck.step import Step

_APART = {"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.select"}
_CUTS = {"aten.slice", "aten.narrow", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.select"}
_GATHERS = {"all_gather_single", "_c10d_functional.all_gather_into_tensor"}
_REDUCES = {"c10d.allreduce", "all_reduce", "reduce_scatter_single", "_c10d_functional.all_reduce"}
_WRITES = {"aten.copy", "aten.where", "aten.index_put", "aten.slice_scatter"}
_PROBES = {"aten.isnan", "aten.isinf", "aten.isfinite", "aten.eq", "aten.ne"}
_OF_WHOLE = {
    "c10d.allreduce",
    "all_reduce",
    "all_gather_single",
    "reduce_scatter_single",
    "copy_to_tp",
    "scatter_single",
}
"""Wrappers that take the value for one of the whole tensor; any other call may bring it where it belongs."""

CARRIED, COMPLETED, LOST, WRONG = "carried", "completed", "lost", "wrong"
"""What an op makes of a pending value: another pending one, a right one, one that is not followed, or a violation."""


@dataclass(frozen=True)
class _Follow:
    """Ops by what they do to a pending value of one kind; any other op is a violation."""

    carried: Set[str]
    completed: Set[str]
    """Ops that complete it beside a value of this rank's own, such as what the ranks before it have."""
    scaled: bool = False
    """Products with values that are equal on all ranks carry it as well."""
    lost: Set[str] = frozenset()
    """Ops after which it is not followed: they put it beside the statistic that local values are merged by."""
    lost_with_partial: Set[str] = frozenset()
    """Ops after which it is not followed if an operand is partial, as where two ranks' results are merged."""


_FOLLOWS = {
    "scan": _Follow({*VIEWS, "aten.neg", "aten.exp"}, completed=SUMS, scaled=True),
    "product": _Follow(VIEWS, completed={"aten.mul"}),
    "shift": _Follow(
        {*VIEWS, *SCALINGS, *_GATHERS, "aten.mm", "aten.bmm", "aten.mv", "aten.sum", "aten.exp", "aten.native_dropout"},
        completed={"aten.mul", "aten.div"},
        lost={*PACKS, "aten.log", "aten.reciprocal"},
        lost_with_partial={*SUMS, *SCALINGS},
    ),
    "moment": _Follow(
        {*VIEWS, *_GATHERS, *_REDUCES, "aten.pow", "aten.sum", "aten.mean"}, completed=SUMS, scaled=True, lost=PACKS
    ),
}


def judge_pending(step: Step, pending: Pending, judge: Callable[[Step], list[SpmdType]]) -> list[SpmdType]:
    """Types of the results of an op that reads a pending value; `judge` gives them for the value as it stands."""
    outcome = _outcome(step, pending)
    if outcome == WRONG:
        step.flag(pending.misused(f"{step.name} uses it"))
    if outcome in (WRONG, LOST):
        return step.typed(UNKNOWN)
    plain = replace(step, type_of=lambda tensor: replace(step.type_of(tensor), pending=None))
    types = judge(plain)
    if outcome == COMPLETED:
        return types
    carried = _next(step, pending)
    return [type_ if type_.kind in ("U", "C") else replace(type_, pending=carried) for type_ in types]


def _outcome(step: Step, pending: Pending) -> str:
    if step.name in SAME_VALUE:
        return CARRIED
    is_torchs = step.name.startswith(("aten.", "_c10d_functional."))
    is_custom = not is_torchs and step.name not in _OF_WHOLE
    if is_custom or step.name in _PROBES:
        return LOST
    if pending.kind in _OUTCOMES:
        return _OUTCOMES[pending.kind](step, pending)
    return _followed(step, _FOLLOWS[pending.kind])


def _followed(step: Step, follow: _Follow) -> str:
    if step.name in follow.completed and _has_own_value(step):
        return COMPLETED
    if step.name in follow.lost:
        return LOST
    if step.name in follow.lost_with_partial and _has_partial(step):
        return LOST
    if step.name in follow.carried:
        return CARRIED
    are_whole = all(type_.is_whole for type_ in step.types.without_pending)
    if follow.scaled and are_whole and step.name in SCALINGS:
        return CARRIED
    return WRONG


def _running(step: Step, pending: Pending) -> str:
    """As `_followed`; but the last place is the total of the shard, which other ranks may need."""
    argument = {"aten.slice": "start", "aten.narrow": "start", "aten.select": "index"}.get(step.name)
    if argument is not None and step.dim_at(1) == step.type_at(0).dim:
        last = step.args[0].shape[step.dim_at(1)] - 1
        if step.arg(2, argument, 0) in (-1, last):
            return LOST
    return _followed(step, _FOLLOWS[pending.kind])


def _next(step: Step, pending: Pending) -> Pending:
    """The pending value after an op that carries it."""
    if pending.kind == "scan" and step.name == "aten.exp":
        return replace(pending, kind="product")
    if pending.kind == "blocks" and step.name == "aten.cat":
        kind = "statistics" if pending.op else "summands"
        return replace(pending, kind=kind, dim=_joined_at(step))
    if pending.kind not in ("gather", "summands", "statistics"):
        return pending
    if step.name in _APART:
        return replace(pending, kind="blocks")
    if step.name not in VIEWS:
        return pending
    if step.out.shape != step.args[0].shape:
        return replace(pending, dim=None)
    return pending


def _has_own_value(step: Step) -> bool:
    """True when an operand differs per rank on no known dim, as what a rank knows of itself or of the ranks before."""
    for type_ in step.types.without_pending:
        if type_.kind in ("I", "R"):
            is_own = type_.origin.maker == "all_gather"
        else:
            is_own = type_.kind in ("V", "U") and type_.dim is None
        if is_own:
            return True
    return False


def _has_partial(step: Step) -> bool:
    """True when an operand is partial that is not pending, or one of several pending ones."""
    others = step.types.without_pending
    if len(step.types) > len(others) + 1:
        return step.types.has("P")
    return others.has("P")


def _halo(step: Step, pending: Pending) -> str:
    if step.name in _WRITES:
        return COMPLETED
    if step.name not in VIEWS:
        return WRONG
    if step.name not in _CUTS or pending.dim is None:
        return CARRIED
    is_cut = all(part.shape != step.args[0].shape for part in step.results)
    if is_cut:
        return COMPLETED
    return CARRIED


def _factor(step: Step, pending: Pending) -> str:
    if step.name in VIEWS or step.name == "aten.neg":
        return CARRIED
    if step.name not in SCALINGS:
        return WRONG
    scale = multiplier(step)
    if scale is None:
        return WRONG
    wanted = {"too-large": 1 / step.world, "too-small": step.world}[pending.kind]
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
    is_scaled = step.name in SCALINGS and multiplier(step) is not None
    if is_scaled or step.name == "aten.neg":
        return CARRIED
    if step.name not in PARTIAL_OF:
        return _gather(step, pending)
    is_sum_of_blocks = step.name == "aten.sum" and _is_along(step, pending)
    if is_sum_of_blocks and step.args[0].shape[pending.dim] == step.world:
        return COMPLETED
    return LOST


def _statistics(step: Step, pending: Pending) -> str:
    """What one rank's block may be is not a question of types, so nothing is reported."""
    if step.is_pointwise:
        return COMPLETED
    fits = step.name in CHOICES or reduction_of(step) == pending.op
    if fits and _is_along(step, pending):
        return COMPLETED
    if step.name in VIEWS - _CUTS | _APART:
        return CARRIED
    return LOST


def _is_along(step: Step, pending: Pending) -> bool:
    """True when a reduction or choice is along the dim of the blocks."""
    is_elementwise = len(step.operands) > 1  # as torch.max(x, y)
    return not is_elementwise and pending.dim in reduced_dims(step)


def _blocks(step: Step, pending: Pending) -> str:
    if step.name != "aten.cat":
        return LOST
    if pending.violation.rule == "partial-used-as-whole":
        return CARRIED
    if pending.violation.rule == "wrong-gather-dim" and pending.dim is None:
        return LOST
    if _joined_at(step) == pending.dim:
        return COMPLETED
    return WRONG


def _joined_at(step: Step) -> int:
    dim: int = step.arg(1, "dim", 0)
    return dim % step.args[0][0].dim()


_OUTCOMES: dict[str, Callable[[Step, Pending], str]] = {
    "scan": _running,
    "product": _running,
    "halo": _halo,
    "too-large": _factor,
    "too-small": _factor,
    "gather": _gather,
    "summands": _summands,
    "statistics": _statistics,
    "blocks": _blocks,
}
