"""Events of one rank -> actions: the pure protocol that finds divergence, and the owner of its state.

It uses no torch, thread or store; `on` may be called from any thread. Guarantees: a rank that waits at a position is
released or gets a verdict, as long as each rank runs, compiles or dies; no alarm while all ranks do the same.
"""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, cast

from tpcompile.sentinel.agreement import difference, first_span
from tpcompile.sentinel.asking import Asking, Limits
from tpcompile.sentinel.call_counts import parted_calls
from tpcompile.sentinel.events import (
    Action,
    AlarmHeard,
    Announce,
    Answer,
    Answers,
    Ask,
    Asked,
    Compare,
    Compared,
    CompileEnded,
    CompileStarted,
    Decided,
    DecideEqual,
    Event,
    Failed,
    Later,
    Leaving,
    Look,
    Looked,
    PeerCompiled,
    PeerFailed,
    PeerPassed,
    PeersLeft,
    Post,
    Posted,
    RaiseAlarm,
    RaiseFinding,
    RaiseOneRank,
    Recall,
    RecallAsked,
    Recalled,
    Release,
    Say,
    Settle,
    Settled,
    StillCompiling,
    StopWatching,
    TellPassed,
    TellValues,
    Tick,
    Wait,
    WentPast,
)
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import CompilePost, Position, RankState
from tpcompile.sentinel.parted import parted
from tpcompile.sentinel.progress import Progress, Region
from tpcompile.sentinel.split import parts_alone, split_alone
from tpcompile.sentinel.variants import wrong_variant

_WHILE_WATCHED = (StillCompiling, Tick, Looked, Failed, PeerFailed)
"""Events that are ignored once the rank is no longer watched."""
_COMPARE_EVERY_S = 2.0
_RECALLS = 3
"""Times that a rank asks for values that differ, while others have not come to them."""
_COMPILE_S = 2.0
"""Time in which a compile that a different rank passed may end, because its result gives a better report."""


class Protocol:
    """The protocol of one rank."""

    def __init__(self, rank: int, members: Sequence[int], progress: Progress, limits: Limits) -> None:
        self.rank, self.members = rank, tuple(members)
        self.progress = progress
        self.asking = Asking(rank, limits, progress)
        self.left: ChainMap[int, RankState] = ChainMap()
        """Ranks that closed their sentinel."""
        self._takes_part = True
        """True while this rank settles alarms, also while it leaves the watched block."""
        self._may_wait = True
        """False after ranks were found to make different calls and the policy continued."""
        self._open: set[Position] = set()
        """Positions at which this rank has compiled."""
        self._free: set[Position] = set()
        """Positions whose code may run."""
        self._passed: dict[Position, RankState] = {}
        """Position -> state of a rank that passed it without compiling."""
        self._compares_at_s = 0.0
        self.has_parted = False
        """What ran on the ranks was found to differ; reported once."""
        self.stopped_because = ""
        """Why this rank stopped watching before its block ended; empty while it watches."""
        self._recalls_left = _RECALLS
        """How often this rank may ask for the values that differ before it names what it knows."""
        self._suspected: Finding | None = None
        """The finding that numbers of collectives differ, until the answers show which collective it is."""
        self._lock = threading.Lock()
        self._handlers: dict[type, Callable[[Any], list[Action]]] = {
            CompileStarted: self._compile_started, CompileEnded: self._compile_ended, Posted: self._posted,
            Failed: self._failed, PeerFailed: self._failed, Leaving: self._leaving, Tick: self._tick,
            Answers: self._answers, Compared: self._compared, PeerCompiled: self._peer_compiled,
            PeerPassed: self._peer_passed, Decided: self._decided, Asked: self._asked, PeersLeft: self._peers_left,
            AlarmHeard: self._alarm_heard, Recalled: self._recalled, Settled: self._settled,
            WentPast: lambda event: [TellPassed(event.found.position)],
            StillCompiling: lambda event: [RaiseOneRank(event.position, event.theirs)],
            Looked: lambda event: self._ask(event.now_s) if event.is_stuck else [],
            RecallAsked: lambda event: [TellValues(event.number, event.span)],
        }  # fmt: skip

    def on(self, event: Event) -> list[Action]:
        """The actions for an event, in order."""
        with self._lock:
            if isinstance(event, _WHILE_WATCHED) and not self.is_active:
                return []
            return self._handlers[type(event)](event)

    @property
    def is_active(self) -> bool:
        """True while this rank is watched."""
        return self.progress.is_active

    def must_wait(self, position: Position) -> bool:
        """True while the code compiled at that position must not run."""
        return self.is_active and self._may_wait and position not in self._free

    def waits_at(self) -> Position | None:
        """Position at which this rank waits; None once released, even if its thread has not woken yet."""
        position = self.progress.waits_at
        return position if position is not None and self.must_wait(position) else None

    def _region(self, position: Position) -> Region:
        return self.progress.region(position.region)

    def _is_left_alone(self, region: Region) -> bool:
        """True when the region is not compared."""
        return region.is_reported or len(self.members) == 1

    def has_decided_all(self) -> bool:
        """True when no comparison is under way."""
        return self._open <= self._free

    # Compiles of this rank.

    def _compile_started(self, event: CompileStarted) -> list[Action]:
        is_left_alone = self._is_left_alone(self._region(event.found.position))
        if is_left_alone:
            return []
        return [Announce(event.found)]

    def _compile_ended(self, event: CompileEnded) -> list[Action]:
        position, post = event.position, event.post
        region = self._region(position)
        if self._is_left_alone(region):
            return []
        self._open.add(position)
        actions: list[Action] = [Post(position, post)]
        needs_others = bool(post.num_collectives or region.num_collectives)
        region.num_collectives = post.num_collectives
        if not self._counts(region, post):
            return actions
        region.ended.add(position.place)
        if position in self._passed:
            actions.append(RaiseOneRank(position, self._passed[position]))
        if needs_others and event.may_wait:
            actions.append(Wait(position))
        return actions

    @staticmethod
    def _counts(region: Region, post: CompilePost) -> bool:
        """False for compiles that may differ: in an uneven region all but those with new collectives."""
        issues = (post.frame, post.collectives)
        is_new = issues not in region.collectives and post.num_collectives > 0
        region.collectives.add(issues)
        return is_new or not region.reason_uneven

    def _posted(self, event: Posted) -> list[Action]:
        if not event.is_last:
            return []
        return [DecideEqual(event.position) if event.is_equal else RaiseAlarm(event.position)]

    def _decided(self, event: Decided) -> list[Action]:
        self._free.add(event.position)
        return [Release()]

    # Positions that ranks passed without compiling.

    def _peer_compiled(self, event: PeerCompiled) -> list[Action]:
        found = event.found
        if found.rank == self.rank or self._region(found.position).is_reported:
            return []
        return [TellPassed(passed.position) for passed in self.progress.announce(found)]

    def _peer_passed(self, event: PeerPassed) -> list[Action]:
        position = event.position
        region = self._region(position)
        self._passed[position] = event.theirs
        if position.place in region.ended:
            return [RaiseOneRank(position, event.theirs)]
        if region.is_local:
            return []  # no rank waits in it: its result decides, whenever it comes
        if position.place in region.compiled and not region.reason_uneven:
            # The divergence is certain. The result of the compile gives a better report, but may take minutes. In an
            # uneven region it is not certain: only the collectives of the result decide.
            return [Later(_COMPILE_S, StillCompiling(position, event.theirs))]
        return []

    # Waiting.

    def _tick(self, event: Tick) -> list[Action]:
        self.asking.notices(event.now_s)
        actions: list[Action] = []
        if event.now_s >= self._compares_at_s:
            self._compares_at_s = event.now_s + _COMPARE_EVERY_S
            actions.append(Compare())
        if self.asking.wants_to_ask(event.now_s):
            actions += self._ask(event.now_s)
        elif self.asking.wants_to_look(event.now_s):
            actions.append(Look())
        return actions

    def _ask(self, now_s: float) -> list[Action]:
        self.asking.asks(now_s, self.left)
        return [Ask(self._members_without(self.left))]

    def _members_without(self, ranks: Collection[int]) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank not in ranks)

    def _answers(self, event: Answers) -> list[Action]:
        finding = self.asking.why_stuck(event) or self._of_suspected(event.states)
        if finding is not None:
            return [RaiseFinding(finding)]
        known = {**event.states, **self.left}
        news = self.asking.news(known, event.now_s)
        return [Say(news)] if news else []

    def _of_suspected(self, states: Mapping[int, RankState]) -> Finding | None:
        suspected, self._suspected = self._suspected, None
        found = parted(states) if suspected is not None else None
        if suspected is None or found is None or found.is_rank_known:
            return found or suspected
        return replace(found, ranks=suspected.ranks, is_rank_known=True)  # the counters show whose it is

    def _asked(self, event: Asked) -> list[Action]:
        if event.rank != self.rank:
            self.asking.put_off()
        return [Answer(event.number)]

    def _compared(self, event: Compared) -> list[Action]:
        if self.has_parted:
            return []
        if event.is_last:
            self._recalls_left = 1
        finding = _parted(event)
        if finding is None:
            span = first_span(event.links)
            return [] if span is None else [Recall(span, waits=event.is_last)]
        self.has_parted = True
        if finding.is_by_number and self.is_active:
            self._suspected = finding
            return self._ask(self.asking.now_s)
        return [RaiseFinding(finding)]

    def _recalled(self, event: Recalled) -> list[Action]:
        """Name the value that differs, once all ranks have come to it: a majority is one of all ranks."""
        if self.has_parted:
            return []
        self._recalls_left -= 1
        reached = {rank for rank, values in event.values.items() if event.span.upto in values} | event.nums.keys()
        if self._recalls_left > 0 and not reached.issuperset(self.members):
            return []  # the next comparison asks again
        finding = difference(event.values, event.span, event.nums, num_members=len(self.members))
        if finding is None:
            return []
        self.has_parted = True
        return [RaiseFinding(finding)]

    # Ends.

    def _peers_left(self, event: PeersLeft) -> list[Action]:
        # no copy: a state is read when it is asked for
        self.left = ChainMap(cast("MutableMapping[int, RankState]", event.states), *self.left.maps)
        return []

    def _alarm_heard(self, event: AlarmHeard) -> list[Action]:
        alarm = event.alarm
        if not self._takes_part:
            return []
        if alarm.position is not None and self._region(alarm.position).is_reported:
            return self._decided(Decided(alarm.position))
        self.has_parted |= alarm.position is None  # one such problem is reported, whichever rank found it
        return [Settle(alarm, self._members_without({*self.left, *alarm.gone}))]

    def _settled(self, event: Settled) -> list[Action]:
        position = event.position
        if position is None:
            # The ranks make different calls and continue: none may wait for a compile that does not come.
            self._may_wait &= not event.is_red
            return [Release()]
        self._free.add(position)
        if event.is_red:
            # A reported region is not compared any more, so no rank would release its remaining positions.
            self._region(position).is_reported = True
            self._free |= {other for other in self._open if other.region == position.region}
        return [Release()]

    def _leaving(self, event: Leaving) -> list[Action]:
        self.progress.is_active = False
        return []

    def _failed(self, event: Failed | PeerFailed) -> list[Action]:
        self.progress.is_active = self._takes_part = False
        self.stopped_because = event.why
        return [Release(), StopWatching(event.why)]


def _parted(event: Compared) -> Finding | None:
    """The first difference in what ran on the ranks."""
    return (
        wrong_variant(event.ran)
        or split_alone(event.counted)
        or parts_alone(event.counted)
        or parted_calls(event.counted)
    )
