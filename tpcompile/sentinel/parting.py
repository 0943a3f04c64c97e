"""Collectives of the ranks by number -> the first that differs, and the rank that left the common order: pure.

Collectives of a group carry numbers, so ranks that run the same program issue the same under each number, from the same
lines. Otherwise the rank to blame is the one that deviates from its own earlier sequence of collectives. A collective
from a line that no other rank uses was added; one that usually follows was left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import differ, first
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.finding import Finding, call_or_collective, first_finding
from tpcompile.sentinel.history import History, groups_used
from tpcompile.sentinel.messages import Issued, Key, RankState, place_of
from tpcompile.sentinel.own_sequence import surprise

_KEPT = 1 << 20


def parting(states: Mapping[int, RankState]) -> Finding | None:
    """The first difference; None when the ranks issued the same collectives under common numbers."""
    return first_finding(lambda group: parting_in(History(states, group)), groups_used(states))


def parting_by_evidence(states: Mapping[int, RankState]) -> Finding | None:
    """The same, and all ranks to blame where no evidence tells which of them left the common order."""
    return first_finding(
        lambda group: _first_parting(History(states, group), _by_repeated_sequence, _by_evidence), groups_used(states)
    )


def parting_in(history: History) -> Finding | None:
    """The first difference in one group."""
    return _first_parting(history, _by_own_sequence, _by_number)


def _first_parting(
    history: History,
    by_sequence: Callable[[_Numbered], Finding | None],
    otherwise: Callable[[_Numbered], Finding],
) -> Finding | None:
    all_numbers = map(partial(_Numbered, history), history.numbers)
    unlike = [numbered for numbered in all_numbers if numbered.is_unlike]
    if not unlike:
        return None
    oldest = history.numbers[0]
    if unlike[0].number == oldest > 1:
        return None  # they diverged earlier: since then numbers are shifted
    return first_finding(by_sequence, unlike) or otherwise(_first_unlike(unlike))


def _by_own_sequence(numbered: _Numbered) -> Finding | None:
    odd = numbered.deviating() or numbered.alone(at_most=1)
    return _finding(numbered, odd) if odd else None


def _by_repeated_sequence(numbered: _Numbered) -> Finding | None:
    """The same, but a collective that is new to a rank is no deviation: a loop may have ended for the first time."""
    odd = numbered.deviating(is_repeated=True)
    return _finding(numbered, odd) if odd else None


def _by_number(numbered: _Numbered) -> Finding:
    return _finding(numbered, numbered.alone() or numbered.here.unlike_most(_key))


def _by_evidence(numbered: _Numbered) -> Finding:
    here = numbered.here
    odd = here.unlike_majority(_key)  # a line that the others do not use may be one that they have not reached
    return _finding(numbered, odd) if odd else _of_all(here)


def _of_all(here: ByRank[Issued]) -> Finding:
    says = "; ".join(f"{named_ranks(ranks)} issued {here[ranks[0]]}" for ranks in here.groups(_key))
    return Finding(Cause.STUCK_COLLECTIVE, f"the ranks parted: {says}", here.ranks, here.first.line)


@dataclass(frozen=True)
class _Part:
    """The collective of one rank under a number, and its other collectives in that group."""

    rank: int
    number: int
    of_rank: Mapping[int, Issued]

    @cached_property
    def deviates(self) -> bool:
        """True when a different collective followed the same predecessors before."""
        keys = [self.of_rank[number].key for number in sorted(self.of_rank) if number <= self.number]
        here = len(keys) - 1
        return surprise(keys, here, range(here)) > 0

    @cached_property
    def is_repeated(self) -> bool:
        """True when the rank issued this collective before."""
        wanted = self.of_rank[self.number].key
        return any(issued.key == wanted for number, issued in self.of_rank.items() if number < self.number)

    @cached_property
    def times(self) -> int:
        """How often the rank issued this collective."""
        wanted = self.of_rank[self.number].key
        return [issued.key for issued in self.of_rank.values()].count(wanted)

    @cached_property
    def lines(self) -> frozenset[tuple[str, int]]:
        """All lines from which the rank issued collectives."""
        return frozenset[tuple[str, int]]().union(*(issued.place for issued in self.of_rank.values()))


class _Numbered:
    """The collectives of the ranks under one number of a group."""

    def __init__(self, history: History, number: int) -> None:
        self.number, self.here = number, history.under(number)
        self._parts = ByRank({rank: _Part(rank, number, history.of(rank)) for rank in self.here})

    @property
    def is_unlike(self) -> bool:
        """True when the ranks issued different collectives."""
        return self.here.differ(_key) and not _is_one_call(list(self.here.values()))

    @property
    def keys(self) -> tuple[tuple[int, Key], ...]:
        """The collective of each rank, to compare with those of other numbers."""
        return tuple(self.here.map(_key).items())

    def deviating(self, *, is_repeated: bool = False) -> tuple[int, ...]:
        """Ranks that deviate from their own sequence, if not all ranks do; only with a repeated collective if asked."""
        return self._parts.some(lambda part: part.deviates and (part.is_repeated or not is_repeated))

    def alone(self, *, at_most: int = _KEPT) -> tuple[int, ...]:
        """Ranks that issued it at most so often, from a line that no other rank uses; none if all ranks did."""
        return self._parts.some(lambda part: part.times <= at_most and self.own_frames(part.rank))

    def own_frames(self, rank: int) -> list[UserLine]:
        """Frames of a rank's collective from which no other rank issued a collective, innermost first."""
        others = self._parts.without([rank]).values()
        used = set[tuple[str, int]]().union(*(part.lines for part in others))
        return [frame for frame in self.here[rank].stack if not used.issuperset(place_of([frame]))]


def _first_unlike(unlike: Sequence[_Numbered]) -> _Numbered:
    """The difference to report: branches may use two lines at every step, so one that occurs once is preferred."""
    times = Counter(numbered.keys for numbered in unlike)
    once = [numbered for numbered in unlike if times[numbered.keys] == 1]
    return (once or unlike)[0]


def _is_one_call(here: Sequence[Issued]) -> bool:
    """True when ranks issued one collective in one call from one line, some compiled and some eager: no difference.

    Compiled code stands at the first line of its function, whatever line of it issues a collective.
    """
    if differ((issued.what, issued.region, issued.call, issued.call_line) for issued in here):
        return False
    return any(issued.line and issued.region.endswith(f":{issued.line.line}") for issued in here)


def _finding(numbered: _Numbered, odd: tuple[int, ...]) -> Finding:
    others = numbered.here.without(odd)
    theirs, usual = numbered.here[odd[0]], others.first
    own = first(numbered.own_frames(odd[0]))
    who = named_ranks(odd)
    if own is not None:
        says = f"{who} issued {theirs}, which no other rank issues; {named_ranks(others.ranks)} issued {usual}"
        return Finding(call_or_collective(_calls_from(theirs, own)), says, odd, own)
    says = f"{who} left out {usual}{_call_text(usual)}, and issued {theirs}{_call_text(theirs)} instead"
    called_at = usual.call_line or theirs.call_line
    return Finding(call_or_collective(usual.call_line), says, odd, called_at or usual.line)


def _calls_from(issued: Issued, own: UserLine) -> bool:
    """True when the rank's own line calls compiled code: the collective itself is issued by all ranks."""
    line = issued.call_line
    return line is not None and place_of([line]) == place_of([own])


def _call_text(issued: Issued) -> str:
    return f" in its call {issued.call} of {issued.region}" if issued.region else ""


def _key(issued: Issued) -> Key:
    return issued.key
