"""A wrong value with what its op was given -> the kind of mistake: a table, whose first row that fits counts.

A row compares the value with those of the reference: a multiple of one, a part that belongs to a different rank, the
same numbers in a different order. A summand of a rank that was used as if it were whole is told from what it was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import MistakeKind, WrongOp
from tpcompile.numerics.judged import SUMMANDS, Judged, Known, Right, Total, behind, is_near, times
from tpcompile.numerics.traced import Value

_TAKES_APART = {
    "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.slice", "aten.narrow", "aten.unbind", "aten.select",
    "aten.view", "aten._unsafe_view", "aten.reshape",
}  # fmt: skip
_SAME_VALUES = _TAKES_APART | {
    "aten.t", "aten.transpose", "aten.permute", "aten.unsqueeze", "aten.squeeze", "aten.clone", "aten.detach",
    "aten.alias", "aten._to_copy", "aten.expand",
}  # fmt: skip
_LINEAR = _SAME_VALUES | {"aten.add", "aten.sub", "aten.sum", "aten.stack", "aten.cat", "aten._foreach_add"}
_POWERS = {"aten.pow", "aten.linalg_vector_norm", "aten._foreach_norm", "aten._foreach_pow"}
"""Of norms sums over the ranks are made by their squares."""
_ADDS = {"aten.add", "aten.sub", "aten.sum", "aten.stack", "aten.cat", "aten._foreach_add"}
_ACCUMULATES = {"aten.add", "aten.add_"}
"""How autograd adds up the gradients of a tensor that is used twice."""
_PRODUCTS = {"aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.convolution"}
_ADDS_TO_PRODUCT = {"aten.addmm", "aten.baddbmm", "aten.addmv", "aten.convolution"}
_STATISTICS = {
    "aten.mean", "aten.var", "aten.var_mean", "aten.std", "aten.amax", "aten.amin", "aten.max", "aten.min",
    "aten.logsumexp", "aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.native_layer_norm",
    "aten._fused_rms_norm", "aten.native_group_norm", "aten.native_batch_norm", "aten.linalg_vector_norm",
    "aten._foreach_norm",
}  # fmt: skip
"""Ops whose result depends on all of a dim, and that are not sums over it."""
_MASKS = {"aten.where", "aten.masked_fill", "aten.masked_fill_", "aten.index_put", "aten.index_put_"}
_COLLECTIVES = ("_c10d_functional.", "c10d.")
_SUMS_OVER_RANKS = (
    "_c10d_functional.all_reduce", "_c10d_functional.reduce_scatter_tensor", "c10d.allreduce_",
    "c10d._reduce_scatter_base_", "c10d.reduce_scatter_",
)  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """A run of one rank, judged."""

    values: Sequence[Value]
    judged: Sequence[Judged]
    known: Known
    sums: Sequence[Total | None]
    tolerance: float
    rank: int
    size: int

    def divided_behind(self, places: Iterable[int]) -> int:
        """The first of the summands behind these that was made of no summand."""
        summands = behind(places, self.values, self.judged, set(SUMMANDS))
        made = [place for place in summands if summands.isdisjoint(self.values[place].sources)]
        return min(made)

    def given(self, place: int, *judged: Judged) -> list[int]:
        """Those of the sources of a value that are judged so."""
        return [source for source in self.values[place].sources if self.judged[source] in judged]

    def multiple(self, place: int, factor: float) -> Right | None:
        """The value of the reference, or the rank's part of one, of which this is a multiple."""
        value = self.values[place]
        if value.tensor is None or self.size == 1:
            return None
        scaled = times(value.tensor, 1 / factor)
        candidates = (right for right in self.known.with_shape(value.shape) if right.rank in (-1, self.rank))
        return find(candidates, lambda right: is_near(scaled, right.tensor, self.tolerance))

    def same_place(self, value: Value) -> Right | None:
        """The value of the reference that the same op on the same line made."""
        at_line = (right for right in self.known.with_shape(value.shape) if right.rank in (-1, self.rank))
        return find(at_line, lambda right: (right.value.name, right.value.line) == (value.name, value.line))

    def parameter_behind(self, place: int) -> str:
        """The parameter that a value which is no more than a product with it comes from; empty where there is none."""
        for source in self.values[place].sources:
            value = self.values[source]
            if value.is_given and value.name != "an input" and self.judged[source] == Judged.PART:
                return value.name
            is_followed = value.name in _SAME_VALUES or value.name in _PRODUCTS
            found = self.parameter_behind(source) if is_followed else ""
            if found:
                return found
        return ""

    def is_summed_later(self, place: int) -> bool:
        """True where a sum over the ranks is made of this value, or of what linear ops and powers made of it."""
        reached = {place}
        for number in range(place + 1, len(self.values)):
            value = self.values[number]
            if reached.isdisjoint(value.sources):
                continue
            if value.name in _SUMS_OVER_RANKS:
                return True
            if value.name in _LINEAR or value.name in _POWERS:
                reached.add(number)
        return False


Fields = dict[str, Any]
"""Fields of a WrongOp."""


def described(place: int, found: Evidence) -> WrongOp:
    """The finding for the value with which wrong numbers begin."""
    fields: Fields = {}
    for row in ROWS:
        fields = row(place, found)
        if fields:
            break
    place = fields.pop("place", place)
    value = found.values[place]
    right = fields.pop("right", None) or found.same_place(value)
    wanted = None if right is None or right.rank >= 0 else right.value.shown
    everywhere: Fields = {
        "about": value.name,
        "line": value.line,
        "module": value.module,
        "place": place,
        "in_backward": value.in_backward,
        "is_given": value.is_given,
        "size": found.size,
        "got": value.shown,
        "wanted": wanted,
    }
    return WrongOp(**(everywhere | fields))


def gradient_cut(place: int, found: Evidence) -> WrongOp | None:
    """The op through which the other term of a right gradient comes, where this one is a term; None where it is not.

    For a result of the run that is not the one of the reference, and is equal to a different value of it.
    """
    value = found.values[place]
    numbers = value.tensor
    if numbers is None or not value.in_backward:
        return None
    for right in found.known.with_shape(value.shape):
        if right.rank not in (-1, found.rank) or not is_near(numbers, right.tensor, found.tolerance):
            continue
        other = _other_term(right.place, right.trace.values)
        if other is not None:
            return WrongOp(
                about=other.name, line=other.line, module=other.module, place=place,
                kind=MistakeKind.GRADIENT_CUT, in_backward=True, size=found.size,
            )  # fmt: skip
    return None


def _other_term(place: int, values: Sequence[Value]) -> Value | None:
    """The forward op of the gradient that is added to this one in a backward pass; None where none is."""
    reached = {place}
    for number in range(place + 1, len(values)):
        value = values[number]
        if reached.isdisjoint(value.sources):
            continue
        others = [values[source] for source in value.sources if source not in reached]
        if value.name in _ACCUMULATES and others:
            forward = others[0].forward
            return None if forward is None else values[forward]
        if value.name in _SAME_VALUES:
            reached.add(number)
    return None


def _counted_per_rank(place: int, found: Evidence) -> Fields:
    """A whole value, or a number, added to a summand or to a product of two shards, ahead of the sum over the ranks."""
    value = found.values[place]
    is_sum = value.name in _ADDS and bool(found.given(place, *SUMMANDS))
    has_whole = bool(found.given(place, Judged.WHOLE))
    is_product = value.name in _ADDS_TO_PRODUCT and has_whole and len(found.given(place, Judged.PART)) >= 2
    if value.in_backward or not (is_sum or is_product) or not found.is_summed_later(place):
        return {}
    made_of = behind(found.given(place, Judged.WHOLE), found.values, found.judged, set(Judged))
    is_gradient = any(found.values[source].in_backward for source in made_of)
    return {
        "kind": MistakeKind.PER_RANK,
        "of": f"a replicated {'gradient' if is_gradient else 'value'}",
        "wanted": None,
    }


def _times_ranks(place: int, found: Evidence) -> Fields:
    right = found.multiple(place, found.size)
    if right is None:
        return {}
    return {"kind": MistakeKind.TP_TIMES, "ratio": float(found.size), "right": right}


def _one_of_ranks(place: int, found: Evidence) -> Fields:
    right = found.multiple(place, 1 / found.size)
    if right is None:
        return {}
    return {"kind": MistakeKind.ONE_OF_TP, "ratio": 1 / found.size, "right": right}


def _not_summed(place: int, found: Evidence) -> Fields:
    """A summand that is the result, or that an op was given as if it were whole."""
    summands = [place] if found.judged[place].is_summand else found.given(place, *SUMMANDS)
    if not summands:
        return {}
    divided = found.divided_behind(summands)
    value = found.values[divided]
    if _one_of_ranks(divided, found):
        return _one_of_ranks(divided, found) | {"place": divided}
    if value.in_backward:
        return _gradient_not_summed(place, divided, found)
    if value.name in _STATISTICS:
        return {"kind": MistakeKind.LOCAL_STATISTIC, "place": divided}
    of = "" if divided == place else "and is used without it"
    return {"kind": MistakeKind.NOT_SUMMED, "place": divided, "of": of}


def _gradient_not_summed(place: int, divided: int, found: Evidence) -> Fields:
    """The gradient of a collective's result where the collective is what should have summed it; else of an input."""
    fields: Fields = {"kind": MistakeKind.GRADIENT_NOT_SUMMED, "place": divided}
    forward = found.values[place].forward
    if divided == place or forward is None:
        return fields
    collective = _collective_of(forward, found)
    if collective is not None:
        value = found.values[collective]
        fields |= {"about": value.name, "line": value.line, "module": value.module, "of": "what it returns"}
    return fields


def _collective_of(forward: int, found: Evidence) -> int | None:
    """The collective that has its autograd node, or was given the result of this op, or views of it."""
    reached = {forward}
    node = found.values[forward].node
    of_node = (place for place, value in enumerate(found.values) if value.node == node)
    own = find(of_node, lambda place: found.values[place].name.startswith(_COLLECTIVES))
    if own is not None:
        return own
    for number in range(forward + 1, len(found.values)):
        value = found.values[number]
        if value.in_backward or reached.isdisjoint(value.sources):
            continue
        if value.name.startswith(_COLLECTIVES):
            return number
        if value.name in _SAME_VALUES:
            reached.add(number)
    return None


def _cut_as_one(place: int, found: Evidence) -> Fields:
    """A piece of a product with a shard of a packed weight."""
    value = found.values[place]
    given = found.given(place, Judged.PART, Judged.WHOLE)  # the shard of a rank may be all of one piece
    if value.name not in _TAKES_APART or not given:
        return {}
    parameter = found.parameter_behind(place)
    if not parameter:
        return {}
    pieces = math.prod(found.values[given[0]].shape) // max(1, math.prod(value.shape))
    count = f"{pieces} pieces" if pieces > 1 else "pieces"
    return {"kind": MistakeKind.CUT_AS_ONE, "of": parameter, "pieces": count, "wanted": None}


def _other_part(place: int, found: Evidence) -> Fields:
    value = found.values[place]
    if value.tensor is None:
        return {}
    others = (right for right in found.known.parts.get(value.shape, []) if right.rank != found.rank)
    numbers = value.tensor
    right = find(others, lambda right: is_near(numbers, right.tensor, found.tolerance))
    if right is None:
        return {}
    return {"kind": MistakeKind.OTHER_PART, "other": right.rank}


def _local_statistic(place: int, found: Evidence) -> Fields:
    value = found.values[place]
    is_of_shard = value.name in _STATISTICS and bool(found.given(place, Judged.PART))
    return {"kind": MistakeKind.LOCAL_STATISTIC} if is_of_shard else {}


def _masked(place: int, found: Evidence) -> Fields:
    value = found.values[place]
    return {"kind": MistakeKind.MASKED} if value.name in _MASKS else {}


def _order(place: int, found: Evidence) -> Fields:
    value = found.values[place]
    if len(value.moments) < 2:
        return {}
    whole = found.known.whole.get(value.shape, [])
    right = find(whole, lambda right: is_near(value.moments, right.value.moments, found.tolerance))
    if right is None:
        return {}
    return {"kind": MistakeKind.ORDER, "right": right}


def _multiple(place: int, found: Evidence) -> Fields:
    value = found.values[place]
    if value.tensor is None or len(value.moments) < 2:
        return {}
    for right in found.known.with_shape(value.shape):
        size = sum(number**2 for number in right.tensor)
        if right.rank not in (-1, found.rank) or not size:
            continue
        ratio = sum(one * other for one, other in zip(value.tensor, right.tensor, strict=True)) / size
        if ratio and is_near(times(value.tensor, 1 / ratio), right.tensor, found.tolerance):
            return {"kind": MistakeKind.MULTIPLE, "ratio": ratio, "right": right}
    return {}


ROWS: tuple[Callable[[int, Evidence], Fields], ...] = (
    _counted_per_rank,
    _times_ranks,
    _not_summed,
    _one_of_ranks,
    _cut_as_one,
    _other_part,
    _local_statistic,
    _masked,
    _order,
    _multiple,
)
"""The first row that fits counts; what is special stands above what is general."""
