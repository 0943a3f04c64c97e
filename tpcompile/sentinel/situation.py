"""States of all ranks in one round and in the previous round -> ranks that cannot progress by themselves: pure.

A rank is stuck when neither its state nor the collective it waits in changed from one round to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import last
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.timeline.stream import Place, place_of
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import Issued, RankState

_IDLE_S, _IDLE_SHARE = 1.0, 0.25
"""Seconds between two rounds, and the share of a core that the threads of the sentinel stay below."""
_BECAME = {
    "died": (Cause.KILLED, "has died"),
    "stopped": (Cause.STOPPED_RESPONDING, "is stopped (SIGSTOP)"),
    "silent": (Cause.STOPPED_RESPONDING, "does not answer"),
}
"""How a rank was lost -> the cause, and the text about the rank."""


@dataclass(frozen=True)
class Lost:
    """A rank that did not answer."""

    rank: int
    how: str
    """`died`, `stopped` (SIGSTOP) or `silent`."""
    seen: str = ""
    stack: tuple[UserLine, ...] = ()
    """The user's frames of its main thread, outermost first, if faulthandler wrote them."""
    aborted: bool = False
    """The process ended with SIGABRT, as mismatched collectives make it do; a crash elsewhere does not."""
    host: str = ""
    since: str = ""
    """When it was asked first without an answer, by the clock of the rank that asked; empty unless it is silent."""
    is_final: bool = False
    """It died, or has been stopped or silent for too long."""

    @property
    def line(self) -> UserLine | None:
        """Line of its main thread."""
        return last(self.stack)

    @property
    def place(self) -> Place:
        """The same with its callers."""
        return place_of(self.stack)

    @property
    def cause(self) -> Cause:
        """The cause for how it was lost."""
        return _BECAME[self.how][0]

    def __str__(self) -> str:
        says = f"rank {self.rank} {_BECAME[self.how][1]}"
        if self.line:
            return f"{says} in {self.line}"
        return f"{says} ({self.seen})" if self.seen else says


@dataclass(frozen=True)
class Situation:
    """States of all ranks in one round."""

    now: ByRank[RankState]
    before: Mapping[int, RankState]
    """States in the previous round."""
    lost: ByRank[Lost]
    """Ranks that did not answer."""
    other_domains: Mapping[int, RankState] = field(default_factory=dict)
    """Waiting ranks of other domains; only their collectives in groups shared with this domain count."""

    @property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that run the same program; each rank of another domain for itself, as its peers may not wait."""
        return (self.now.ranks, *((rank,) for rank in self.other_domains)) if self.other_domains else ()

    @cached_property
    def stuck(self) -> ByRank[Issued]:
        """Rank -> the collective in which it is stuck."""
        return self.now.found(self._stuck_in)

    @cached_property
    def calling(self) -> ByRank[RankState]:
        """Ranks in the same call of a collective since the previous round, without having issued it."""
        return self.now.where(self._is_calling)

    @cached_property
    def in_p2p(self) -> ByRank[RankState]:
        """Ranks in the same send or receive since the previous round, whose peer is in `now`."""
        here = self.now.where(lambda state: state.p2p is not None and state.p2p.peer in self.now)
        return here.where(lambda state: state.p2p == self._then(state).p2p and not self._is_met(state))

    def is_idle(self, rank: int) -> bool:
        """True for a rank whose main thread is stuck in a collective, and that has hardly used CPU time meanwhile."""
        state, issued = self.now[rank], self.stuck.get(rank)
        then = self._then(state)
        if issued is None or then.blocked_in is None or not state.blocked:
            return False
        elapsed_s = issued.age_s - then.blocked_in.age_s
        return elapsed_s >= _IDLE_S and state.cpu_s - then.cpu_s <= _IDLE_SHARE * elapsed_s

    def _then(self, state: RankState) -> RankState:
        return self.before.get(state.rank, RankState(rank=state.rank, activity="", since_s=0.0))

    def _stuck_in(self, state: RankState) -> Issued | None:
        then = self._then(state)
        issued, old = state.blocked_in, then.blocked_in
        if issued is None or old is None:
            return None
        if (issued.id, state.stack) != (old.id, then.stack):
            return None
        # A rank that compiles is stuck only in a collective issued since the compile began, by the compiler itself.
        is_older = state.compiles and issued.age_s > state.since_s
        return None if is_older else issued

    def _is_met(self, state: RankState) -> bool:
        """True where the peer has posted its end: a program need not wait for what it sends, which then seems open."""
        p2p = state.p2p
        if p2p is None or p2p.number == 0:
            return False
        wanted = ("recv" if p2p.op == "send" else "send", state.rank, p2p.tag)
        messages = self.now[p2p.peer].messages
        ends = [one for one in messages if (one.op, one.peer, one.tag) == wanted and not one.is_queued]
        posted = max((one.number_of_tag or one.number for one in ends), default=0)
        return posted >= (p2p.number_of_tag or p2p.number)

    def _is_calling(self, state: RankState) -> bool:
        if state.p2p is not None:
            return False  # it names a group, too, and waits for its peer only
        then = self._then(state)
        here = state.calling, state.stack, len(state.issued)
        return bool(state.calling) and here == (then.calling, then.stack, len(then.issued))


Finder = Callable[[Situation], Finding | None]
"""A rule: why the ranks do not progress, or None when it does not apply."""
