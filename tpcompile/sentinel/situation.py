"""What all ranks say in one round, and said in the round before -> which of them cannot move by themselves: pure.

A rank is stuck when neither it nor what it waits in has changed from one round to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import last
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import Issued, Place, RankState, place_of

_BECAME = {
    "died": (Cause.KILLED, "is gone: its process died"),
    "stopped": (Cause.STOPPED_RESPONDING, "is stopped (SIGSTOP)"),
    "silent": (Cause.STOPPED_RESPONDING, "does not answer"),
}
"""How a rank was lost -> the cause, and what is said of the rank."""
_SILENT = RankState(rank=-1, activity="", since_s=0.0)
"""In place of what a rank did in a round in which it did not answer: nothing that it may still do."""


@dataclass(frozen=True)
class Lost:
    """A rank that did not answer."""

    rank: int
    how: str
    """`died`, `stopped` (SIGSTOP) or `silent`."""
    seen: str = ""
    stack: tuple[UserLine, ...] = ()
    """The user's frames its main thread was in, outermost first, when it left a black box."""
    aborted: bool = False
    """It ended itself (SIGABRT), as collectives that do not fit make a process do; a crash elsewhere does not."""
    is_final: bool = False
    """It died, or has been stopped or silent for too long."""

    @property
    def line(self) -> UserLine | None:
        """Where its main thread was."""
        return last(self.stack)

    @property
    def place(self) -> Place:
        """The same with the lines that called it."""
        return place_of(self.stack)

    @property
    def cause(self) -> Cause:
        """What it is called that became of it."""
        return _BECAME[self.how][0]

    def __str__(self) -> str:
        says = f"rank {self.rank} {_BECAME[self.how][1]}"
        if self.line:
            return f"{says} in {self.line}"
        return f"{says} ({self.seen})" if self.seen else says


@dataclass(frozen=True)
class Situation:
    """What is known of all ranks."""

    now: ByRank[RankState]
    before: Mapping[int, RankState]
    """What they said in the round before."""
    lost: ByRank[Lost]
    """Ranks that did not answer."""
    other_domains: Mapping[int, RankState] = field(default_factory=dict)
    """Ranks of other domains that wait, too: of those counts only what they issued in a group that these are in."""

    @cached_property
    def stuck(self) -> ByRank[Issued]:
        """In which collective each rank is stuck."""
        return self.now.found(self._stuck_in)

    @cached_property
    def calling(self) -> ByRank[RankState]:
        """Ranks that have been in one call of a collective since the round before, without issuing it."""
        return self.now.where(self._is_calling)

    @cached_property
    def in_p2p(self) -> ByRank[RankState]:
        """Ranks that have been in one send or receive since the round before, of a rank that takes part."""
        return self.now.where(self._is_in_p2p)

    def _then(self, state: RankState) -> RankState:
        return self.before.get(state.rank, _SILENT)

    def _stuck_in(self, state: RankState) -> Issued | None:
        then = self._then(state)
        issued, old = state.blocked_in, then.blocked_in
        if issued is None or old is None:
            return None
        if (issued.id, state.stack) != (old.id, then.stack):
            return None
        # A rank that compiles is stuck only in what it issued since it began to: a collective of the compiler.
        is_older = state.compiles and issued.age_s > state.since_s
        return None if is_older else issued

    def _is_in_p2p(self, state: RankState) -> bool:
        p2p = state.p2p
        return p2p is not None and p2p.peer in self.now and p2p == self._then(state).p2p

    def _is_calling(self, state: RankState) -> bool:
        then = self._then(state)
        here = state.calling, state.stack, len(state.issued)
        return bool(state.calling) and here == (then.calling, then.stack, len(then.issued))


Finder = Callable[[Situation], Finding | None]
"""Why nothing moves, as far as one rule can tell; None where that is not the reason."""
