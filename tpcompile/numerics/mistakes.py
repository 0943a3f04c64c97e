"""A wrong value with what its op was given -> the kind of mistake: a table, whose first row that fits counts.

A row compares the value with those of the reference: a multiple of one, a part that belongs to a different rank, the
same numbers in a different order. A summand of a rank that was used as if it were whole is told from what it was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from tpcompile.evidence.iterables import find, num_equal
from tpcompile.evidence.records import MistakeKind, UserLine, WrongOp
from tpcompile.numerics.apart import carried, other_places, own_divisor
from tpcompile.numerics.beside_reference import late, other_number, update_multiple
from tpcompile.numerics.judged import (
    SUMMANDS,
    Judged,
    all_behind,
    allowed_for,
    behind,
    is_near,
    multiple_of,
    own_use,
    times,
)
from tpcompile.numerics.judged_run import Evidence
from tpcompile.numerics.op_names import (
    ACCUMULATES,
    ADDS,
    ADDS_TO_PRODUCT,
    COLLECTIVES,
    CROSSES_PLACES,
    MASKS,
    SAME_VALUES,
    SQUARES,
    STATISTICS,
    SUMS_OVER_RANKS,
    TAKES_APART,
)
from tpcompile.numerics.trace import Value

Fields = dict[str, Any]
"""Fields of a WrongOp."""


def described(place: int, found: Evidence, wrong: Collection[int] = ()) -> WrongOp:
    """The finding for the value with which wrong numbers begin; `wrong` are the places of all that led to them."""
    found = replace(found, tolerance=allowed_for(found.values[place], found.tolerance))
    fields: Fields = {}
    for row in ROWS:
        fields = row(place, found)
        if fields:
            break
    place = fields.pop("place", place)
    if fields.get("kind") in _OF_NUMBERS:
        place = found.made_at(place)
    value = found.values[place]
    right = fields.pop("right", None) or found.same_place(value)
    wanted = None if right is None or right.rank >= 0 else right.value.shown
    everywhere: Fields = {
        "about": value.name,
        "line": _telling_line(place, found.values, wrong),
        "module": value.module,
        "place": place,
        "in_backward": value.in_backward,
        "is_given": value.is_given,
        "size": found.size,
        "got": value.shown,
        "wanted": wanted,
    }
    return WrongOp(**(everywhere | fields))


_OF_NUMBERS = (None, MistakeKind.OTHER_PART, MistakeKind.MULTIPLE)
"""Kinds that a copy, or a view, has of what it is one of."""


def _telling_line(place: int, values: Sequence[Value], wrong: Collection[int]) -> UserLine | None:
    """The line of a wrong value; where it did no wrong in other calls, the caller that those do not share with it."""
    value = values[place]
    lines = (value.line, *value.callers)
    right = [
        (each.line, *each.callers)
        for number, each in enumerate(values)
        if (each.name, each.line) == (value.name, value.line) and number not in wrong
    ]
    if place not in wrong or not right:
        return value.line
    shared = max(num_equal([lines, other]) for other in right)
    return lines[shared] if shared < len(lines) else value.line


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
        if value.name in ACCUMULATES and others:
            forward = others[0].forward
            return None if forward is None else values[forward]
        if value.name in SAME_VALUES:
            reached.add(number)
    return None


def _counted_per_rank(place: int, found: Evidence) -> Fields:
    """A whole value, or a number, added to a summand or to a product of two shards, ahead of the sum over the ranks."""
    value = found.values[place]
    is_sum = value.name in ADDS | ACCUMULATES and bool(found.given(place, *SUMMANDS))
    has_whole = bool(found.given(place, Judged.WHOLE))
    is_product = value.name in ADDS_TO_PRODUCT and has_whole and len(found.given(place, Judged.PART)) >= 2
    is_square = value.name in SQUARES and found.is_made_of_both(place)
    summed = found.summed_later(place)
    if not (is_sum or is_product or is_square) or summed is None:
        return {}
    counted = value.sources if is_square else found.given(place, Judged.WHOLE)
    made_of = behind(counted, found.values, found.judged, set(Judged))
    is_gradient = any(found.values[source].in_backward for source in made_of)
    of = f"a replicated {'gradient' if is_gradient else 'value'}"
    fields: Fields = {"kind": MistakeKind.PER_RANK, "of": of, "wanted": None}
    if value.in_backward:  # autograd adds: that has no line of its own
        fields["line"] = found.values[summed].line
    return fields


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
    shares = [_one_of_ranks(each, found) for each in found.made_of_no_summand(summands)]
    if all(shares):  # else a replicated term is a share of a sum that is not made
        return shares[0] | {"place": divided}
    if value.in_backward and not value.is_by_hand:
        return _gradient_not_summed(place, divided, found)
    if value.name in STATISTICS:
        return {"kind": MistakeKind.LOCAL_STATISTIC, "place": divided}
    of = "" if divided == place else "and is used without it"
    return {"kind": MistakeKind.NOT_SUMMED, "place": divided, "of": of}


def _wrong_group(place: int, found: Evidence) -> Fields:
    """A sum over ranks of what is right as the sum over all of them, and that is not that sum."""
    value = found.values[place]
    if value.name not in SUMS_OVER_RANKS or not found.given(place, Judged.PARTIAL, Judged.AVERAGED):
        return {}
    return {} if _one_of_ranks(place, found) else {"kind": MistakeKind.WRONG_GROUP}


def _gradient_not_summed(place: int, divided: int, found: Evidence) -> Fields:
    """The gradient of a collective's result where the collective is what should have summed it; else of an input.

    Of a parameter where the program takes it as a plain tensor, as `DTensor.to_local` does.
    """
    fields: Fields = {"kind": MistakeKind.GRADIENT_NOT_SUMMED, "place": divided}
    forward = found.values[place].forward
    if forward is None:
        return fields
    begun = None if divided == place else _collective_of(forward, found)
    if begun is None:
        begun = found.taken_at(forward, found.values[divided])
    if begun is not None:
        value = found.values[begun]
        fields |= {"about": value.name, "line": value.line, "module": value.module, "of": "what it returns"}
    return fields


def _collective_of(forward: int, found: Evidence) -> int | None:
    """The collective that has its autograd node, or was given the result of this op, or views of it."""
    reached = {forward}
    node = found.values[forward].node
    of_node = (place for place, value in enumerate(found.values) if value.node == node)
    own = find(of_node, lambda place: found.values[place].name.startswith(COLLECTIVES))
    if own is not None:
        return own
    for number in range(forward + 1, len(found.values)):
        value = found.values[number]
        if value.in_backward or reached.isdisjoint(value.sources):
            continue
        if value.name.startswith(COLLECTIVES):
            return number
        if value.name in SAME_VALUES:
            reached.add(number)
    return None


def _cut_as_one(place: int, found: Evidence) -> Fields:
    """A piece of a product with a shard of a packed weight."""
    value = found.values[place]
    given = found.given(place, Judged.PART, Judged.WHOLE)  # the shard of a rank may be all of one piece
    if value.name not in TAKES_APART or not given:
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
    is_named = value.is_given and bool(found.known.given_as(value))
    if right is None and not (is_named and found.judged[place] == Judged.WRONG):
        return {}
    fields: Fields = {"kind": MistakeKind.OTHER_PART} | ({} if right is None else {"other": right.rank})
    is_place = value.is_given and not value.is_float
    use = own_use(place, found.values, found.sums, size=found.size, tolerance=found.tolerance) if is_place else None
    return fields if use is None else fields | {"line": found.values[use].line}


def _local_statistic(place: int, found: Evidence) -> Fields:
    value = found.values[place]
    is_of_shard = value.name in STATISTICS and bool(found.given(place, Judged.PART))
    return {"kind": MistakeKind.LOCAL_STATISTIC} if is_of_shard and not found.is_only_combined(place) else {}


def _whole_among_parts(place: int, found: Evidence) -> Fields:
    """What is summed over the ranks was made of a whole value that each rank has put together with its part."""
    made_of = all_behind([place], found.values)
    both = [at for at in made_of if found.is_of_both(at)] if found.summed_later(place) is not None else []
    return {"kind": MistakeKind.PER_RANK, "place": max(both), "of": "a replicated value"} if both else {}


def _combined_statistic(place: int, found: Evidence) -> Fields:
    """Means of the ranks' own, which are not what the mean of all is where the ranks have different numbers of them."""
    is_of_shard = found.values[place].name in STATISTICS and bool(found.given(place, Judged.PART))
    return {"kind": MistakeKind.LOCAL_STATISTIC} if is_of_shard else {}


def _crosses(place: int, found: Evidence) -> Fields:
    is_of_shard = bool(found.given(place, Judged.PART))
    is_crossing = found.values[place].name in CROSSES_PLACES
    return {"kind": MistakeKind.CROSSES} if is_crossing and is_of_shard else {}


def _masked(place: int, found: Evidence) -> Fields:
    value = found.values[place]
    if value.name not in MASKS:
        return {}
    mask = found.values[found.made_mask(place)]
    lines = (mask.line, *mask.callers)  # a helper may make it: its line in the function of the masked value
    function = (value.line.file, value.line.function) if value.line is not None else None
    line = find(lines, lambda line: line is not None and (line.file, line.function) == function)
    of = "" if mask is value else "and this line decides in which"
    return {"kind": MistakeKind.MASKED, "line": line or mask.line, "of": of}


def _order(place: int, found: Evidence) -> Fields:
    value = found.values[place]
    total = found.sums[place] if found.sums else None
    right = found.known.reordered(value, total, found.rank, found.tolerance)
    return {} if right is None else {"kind": MistakeKind.ORDER, "right": right}


def _multiple(place: int, found: Evidence) -> Fields:
    value = found.values[place]
    if value.tensor is None or len(value.moments) < 2:
        return {}
    for right in found.known.with_shape(value.shape):
        if right.rank not in (-1, found.rank):
            continue
        ratio = multiple_of(value.tensor, right.tensor)
        if ratio and is_near(times(value.tensor, 1 / ratio), right.tensor, found.tolerance):
            return {"kind": MistakeKind.MULTIPLE, "ratio": ratio, "right": right}
    return {}


def _put_together_otherwise(place: int, found: Evidence) -> Fields:
    """What an op was given has the numbers of a whole value in another shape: parts side by side along a wrong dim."""
    together = found.put_together(place)
    right = None if together is None else found.known.in_other_shape(found.values[together], found.tolerance)
    return {} if right is None else {"kind": MistakeKind.ORDER, "place": together, "right": right}


ROWS: tuple[Callable[[int, Evidence], Fields], ...] = (
    _counted_per_rank,
    other_number,
    _times_ranks,
    _wrong_group,
    own_divisor,
    _not_summed,
    _one_of_ranks,
    _cut_as_one,
    late,
    update_multiple,
    other_places,
    _other_part,
    _local_statistic,
    _crosses,
    _masked,
    _order,
    _multiple,
    _combined_statistic,
    _whole_among_parts,
    _put_together_otherwise,
    carried,
)
"""The first row that fits counts; what is special stands above what is general."""
