"""An op of the run beside the same op of the reference -> what it was given that the reference's op was not.

A value may be right by itself and yet not the one to use: that of the step before. The op that uses it is the first
wrong one, and its counterpart shows which of its inputs differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tpcompile.evidence.records import MistakeKind
from tpcompile.numerics.judged import Judged, Right, all_behind, has, is_near, multiple_of, times
from tpcompile.numerics.judged_run import Evidence
from tpcompile.numerics.op_names import BY_NUMBERS
from tpcompile.numerics.trace import Value

_IN_PLACE = "_"
"""Last letter of an op that writes into what it was given first."""


class Pair(NamedTuple):
    """What an op was given, and what the reference's was at the same place."""

    own: int
    right: int
    """Place in the reference's trace."""
    is_equal: bool


def late(place: int, found: Evidence) -> dict[str, Any]:
    """An input that is equal to an earlier one of the reference, made by the same op, while the others are right.

    Where the run made it fewer times than the reference did, the newer one is not there: ops are left out.
    """
    for right in _same_ops(place, found):
        pairs = _pairs(place, right, found)
        unlike = [pair for pair in pairs if not pair.is_equal]
        if not unlike or len(unlike) == len(pairs) or not _is_same_time(place, right, found):
            continue
        if all(_is_earlier(pair, right, found) for pair in unlike):
            begun = _begun(place, found)
            own, with_it = (place, right) if begun is None else begun
            unlike = [pair for pair in _pairs(own, with_it, found) if not pair.is_equal]
            wanted = right.trace.values[unlike[0].right] if unlike else with_it.value
            is_fewer = _is_made_less(wanted, right, found)
            kind = MistakeKind.LEFT_OUT if is_fewer else MistakeKind.LATE
            return {"kind": kind, "of": f"the result of {wanted.name}", "right": with_it, "place": own}
    return {}


def _begun(place: int, found: Evidence) -> tuple[int, Right] | None:
    """The first update in place behind it that made something else than the reference's did then, and that one.

    It may be right by itself: as what the reference has at another time.
    """
    made = all_behind(found.values[place].sources, found.values)
    for at in sorted(at for at in made if found.values[at].name.endswith(_IN_PLACE)):
        same = [right for right in _same_ops(at, found) if _is_same_time(at, right, found, counts_differ=False)]
        numbers = found.values[at].tensor
        if same and numbers is not None and not any(is_near(numbers, one.tensor, found.tolerance) for one in same):
            return at, same[0]
    return None


def _is_same_time(place: int, right: Right, found: Evidence, *, counts_differ: bool = True) -> bool:
    """True for the same pass through the line; `counts_differ` where one run comes there more often."""
    value, values = found.values[place], right.trace.values
    if _count(found.values, value) != _count(values, right.value):
        return counts_differ
    return _count(found.values[:place], value) == _count(values[: right.place], right.value)


def other_number(place: int, found: Evidence) -> dict[str, Any]:
    """An op that is given what the reference's on this line is given, but for a number that the program calculates."""
    value = found.values[place]
    for right in _same_ops(place, found) if value.name in BY_NUMBERS else ():
        own, other = value.numbers, right.value.numbers
        pairs = _pairs(place, right, found)
        if pairs and len(own) == len(other) and all(pair.is_equal for pair in pairs):
            unlike = [(one, wanted) for one, wanted in zip(own, other, strict=True) if one != wanted]
            if unlike:
                one, wanted = unlike[0]
                return {"kind": MistakeKind.OTHER_NUMBER, "of": f"{one:g}, and on one rank {wanted:g}", "right": right}
    return {}


def update_multiple(place: int, found: Evidence) -> dict[str, Any]:
    """What an op adds in place is a multiple of what the reference's adds to the same value."""
    value = found.values[place]
    if not value.name.endswith(_IN_PLACE) or not value.sources or value.tensor is None:
        return {}
    before = found.values[value.sources[0]].tensor
    for right in _same_ops(place, found):
        first = _pairs(place, right, found)[:1]
        if before is None or not first or not first[0].is_equal:
            continue
        got, wanted = (
            tuple(after - earlier for after, earlier in zip(numbers, before, strict=True))
            for numbers in (value.tensor, right.tensor)
        )
        ratio = multiple_of(got, wanted)
        # Rounded as both were: an update has fewer digits than the weight.
        if ratio != 0 and is_near(times(got, 1 / ratio), wanted, 100 * found.tolerance):
            return {"kind": MistakeKind.MULTIPLE, "ratio": ratio, "right": right, "is_update": True}
    return {}


def _same_ops(place: int, found: Evidence) -> Iterator[Right]:
    """Values of the reference that the same op on the same line made, the rank's part of those that are cut."""
    value = found.values[place]
    for right in found.known.with_shape(value.shape):
        is_own = right.rank in (-1, found.rank)
        if is_own and (right.value.name, right.value.line) == (value.name, value.line):
            yield right


def _pairs(place: int, right: Right, found: Evidence) -> list[Pair]:
    sources = found.values[place].sources
    if len(sources) != len(right.value.sources):
        return []
    return [
        Pair(own, other, _is_equal(found.values[own], right.trace.values[other], found))
        for own, other in zip(sources, right.value.sources, strict=True)
    ]


def _is_equal(own: Value, right: Value, found: Evidence) -> bool:
    if own.tensor is None:
        return right.tensor is None
    return has(right, own, found.rank, found.tolerance)


def _is_earlier(pair: Pair, right: Right, found: Evidence) -> bool:
    """True where the reference made it earlier by the op that makes what it gives."""
    own, wanted = found.values[pair.own], right.trace.values[pair.right]
    if found.judged[pair.own] == Judged.WRONG:
        return False
    before = right.trace.values[: pair.right]
    same = [value for value in before if (value.name, value.line) == (wanted.name, wanted.line)]
    chain = [right.trace.values[source] for source in wanted.sources if wanted.name.endswith(_IN_PLACE)]
    return any(_is_equal(own, value, found) for value in [*same, *chain])


def _is_made_less(wanted: Value, right: Right, found: Evidence) -> bool:
    """True where the run has fewer such ops than the reference: on that line, or in all where it never comes there."""
    own = _count(found.values, wanted)
    if own:
        return own < _count(right.trace.values, wanted)
    counts = [sum(value.name == wanted.name for value in values) for values in (found.values, right.trace.values)]
    return counts[0] < counts[1]


def _count(values: Sequence[Value], like: Value) -> int:
    return sum((value.name, value.line) == (like.name, like.line) for value in values)
