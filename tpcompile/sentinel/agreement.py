"""Values that ranks said are equal -> the first one that is not, with its name, its line and the ranks: pure.

Each rank chains the hashes of its values, one after the other. Ranks compare a few links of their chains, whatever
number of values lies between; only where a link differs are the values before it asked for, one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated

from pydantic import Field

from tpcompile.evidence.groups.by_rank import ByRank, entry
from tpcompile.evidence.iterables import differ, first
from tpcompile.evidence.records import Frozen, UserLine
from tpcompile.evidence.records.bounds import Number
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.finding import Finding

KEPT = 4096
"""The newest values that a rank remembers."""
KEPT_LEFT = 64
"""Those that it leaves behind, for ranks that find a difference after its end."""
_STRIDES = (1, 16, 256, 4096, 65536)
_LINKS = 8
"""Links that are kept at multiples of each stride: ranks that are d values apart share one at most d / 4 back."""
_LINK_BYTES = 8
MAX_NAME = 200
_Text = Annotated[str, Field(max_length=MAX_NAME + 100)]


class Value(Frozen):
    """One value that a rank said is equal on all ranks."""

    name: _Text
    call: Number
    """Number of the call of `agree` with this name, from 1."""
    what: _Text
    """dtype and shape of a tensor, a small Python value, or the class of any other."""
    bits: Annotated[str, Field(max_length=64)] = ""
    """Hash of the content; empty where `what` has all of it."""
    line: UserLine | None = None
    """The user's call of `agree`, or of the callable whose outputs these are."""
    step: int | None = None

    @property
    def place(self) -> tuple[str, int]:
        """Name and call: equal on ranks that make the same calls in the same order."""
        return self.name, self.call

    @property
    def content(self) -> tuple[str, str]:
        """What must be equal."""
        return self.what, self.bits

    @property
    def shown(self) -> str:
        """`int64[4] (hash 3fa91c)`, or a number."""
        return f"{self.what} (hash {self.bits[:6]})" if self.bits else self.what

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.name!r} (call {self.call}{step})"


class Links(Frozen):
    """How far a rank is, and some links of its chain."""

    num: Number = 0
    """Values so far."""
    links: Annotated[dict[Number, Annotated[str, Field(max_length=2 * _LINK_BYTES)]], Field(max_length=64)] = {}
    """Number of a value, from 1 -> hash of it and of all before it."""
    is_over: bool = False
    """The rank leaves: no more values follow."""


class Span(Frozen):
    """The first difference is at a number after `after`, up to `upto`."""

    after: Number
    upto: Number


class Chain:
    """The values of this rank. Not thread-safe."""

    def __init__(self) -> None:
        self.num = 0
        self._link = ""
        self._links = {stride: deque[tuple[int, str]](maxlen=_LINKS) for stride in _STRIDES}
        self._values: deque[tuple[int, Value]] = deque(maxlen=KEPT)

    def add(self, value: Value) -> None:
        """Append a value."""
        self.num += 1
        said = repr((self._link, value.place, value.content)).encode()
        self._link = blake2b(said, digest_size=_LINK_BYTES).hexdigest()
        self._values.append((self.num, value))
        for stride, kept in self._links.items():
            if self.num % stride == 0:
                kept.append((self.num, self._link))

    def links(self, *, is_over: bool = False) -> Links:
        """What the other ranks compare."""
        links = {number: link for kept in self._links.values() for number, link in kept}
        return Links(num=self.num, links=links, is_over=is_over)

    def values(self, span: Span) -> dict[int, Value]:
        """Number -> value, as far as they are remembered."""
        return {number: value for number, value in self._values if span.after < number <= span.upto}

    def newest(self) -> dict[int, Value]:
        """Those that a rank leaves behind."""
        return self.values(Span(after=max(0, self.num - KEPT_LEFT), upto=self.num))


def first_span(by_rank: Mapping[int, Links]) -> Span | None:
    """Where the first difference is; None while all that can be compared is equal.

    A rank that has left with fewer values than a different one differs at the first one that it lacks.
    """
    ranks = ByRank(by_rank)
    if len(ranks) < 2:
        return None
    common = sorted(set.intersection(*(set(one.links) for one in ranks.values())))
    unequal = first(number for number in common if differ(one.links[number] for one in ranks.values()))
    equal = [number for number in common if unequal is None or number < unequal]
    if unequal is not None:
        return Span(after=max(equal, default=0), upto=unequal)
    fewest, most = min(one.num for one in ranks.values()), max(one.num for one in ranks.values())
    is_final = all(one.is_over for one in ranks.values() if one.num == fewest)
    if fewest == most or not is_final:
        return None
    return Span(after=max(equal, default=0), upto=fewest + 1)


def difference(
    by_rank: Mapping[int, Mapping[int, Value]], span: Span, nums: Mapping[int, int], *, num_members: int
) -> Finding | None:
    """The first value of the span that differs; None where the ranks that have answered agree.

    `nums` are how many values each rank that has left had in all. A rank is blamed where more than half of all
    members agree without it.
    """
    for number in range(span.after + 1, span.upto + 1):
        values = entry(by_rank, number)
        over = [rank for rank, num in nums.items() if num < number]
        if over and values:
            return _fewer(values, over, number, num_members)
        if len(values) > 1 and values.differ(lambda one: one.place):
            return _other_call(values, number, num_members)
        if len(values) > 1 and values.differ(lambda one: one.content):
            return _other_value(values, num_members)
    return None


def _other_value(values: ByRank[Value], num_members: int) -> Finding:
    odd, is_known = values.blamed(lambda one: one.content, of=num_members)
    value = values[odd[0]]
    before = "; equal before" if value.call > 1 else ""
    observed = f"{value}: {_sides(values, lambda one: one.shown)}{before}"
    return Finding(
        Cause.AGREED_VALUES, observed, odd, value.line, is_rank_known=is_known, is_of_agreement=True,
        at_call=value.call,
    )  # fmt: skip


def _other_call(values: ByRank[Value], number: int, num_members: int) -> Finding:
    odd, is_known = values.blamed(lambda one: one.place, of=num_members)
    observed = f"call {number} of agree, counted over all names, is {_sides(values, str)}"
    line = values[odd[0]].line
    return Finding(Cause.CALL_COUNT, observed, odd, line, is_rank_known=is_known, is_of_agreement=True)


def _fewer(values: ByRank[Value], over: Sequence[int], number: int, num_members: int) -> Finding:
    more = values.first
    has_it: ByRank[Value | None] = ByRank({**dict.fromkeys(over), **values})
    odd, is_known = has_it.blamed(lambda one: one is None, of=num_members)
    observed = (
        f"{named_ranks(over)} ended after {number - 1} calls of agree; {named_ranks(values.ranks)} went on with {more}"
    )
    is_left_out = is_known and odd[0] in over
    return Finding(
        Cause.CALL_COUNT, observed, odd, more.line, is_rank_known=is_known, is_of_agreement=True,
        left_out=more.line if is_left_out else None,
    )  # fmt: skip


def _sides(values: ByRank[Value], text: Callable[[Value], str]) -> str:
    """`7 on ranks 0,2, 8 on rank 1`, the odd ones last."""
    return ", ".join(f"{text(values[ranks[0]])} on {named_ranks(ranks)}" for ranks in values.groups(text))
