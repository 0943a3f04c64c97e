"""What ran on this rank and on other ranks -> an event; on the timer's thread, and when a rank leaves.

On the timer every rank compares with the next rank only, so that the cost does not grow with the number of ranks: if
not all ranks agree, at least two neighbours differ. A rank publishes what it called since the last time. When they
leave, ranks compare a hash; where that differs, one of them reads what all have called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tpcompile.evidence.records.bounds import checked
from tpcompile.sentinel.called import Called, Table, called_by, difference, merged
from tpcompile.sentinel.events import Compared, Event
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.store_log import StoreLog

_LEAVING_S = 2.0


class Comparison:
    """Sends and reads what ran, for one rank."""

    def __init__(
        self, log: StoreLog, progress: Progress, *, on: Callable[[Event], None], has_parted: Callable[[], bool]
    ) -> None:
        self._log, self._progress, self._on, self._has_parted = log, progress, on, has_parted
        self._said: Table = {}
        self._num_said = 0
        """What this rank has published so far, and in how many parts."""
        self._heard: Table = {}
        self._num_heard = 0
        """What the next rank has published so far, and in how many parts."""
        members = log.members
        here = members.index(log.rank)
        self._next, previous = members[(here + 1) % len(members)], members[here - 1]
        self._others = [rank for rank in members if rank != log.rank]
        self._neighbours = sorted({self._next, previous}.intersection(self._others))
        self._is_over = False
        """This rank leaves; the timer may still tick once."""

    def with_the_next(self) -> None:
        """Publish what ran since the last call, and compare with the next rank; nothing while no region is called."""
        called = called_by(self._progress, is_over=False)
        table = called.model_dump(mode="json")
        news = difference(table, self._said)
        if self._is_over or not self._others or not news:
            return
        if self._log.say_more(self._num_said + 1, news):
            self._said, self._num_said = table, self._num_said + 1
        theirs = self._hear()
        self._compare({} if theirs is None else {self._next: theirs}, called)

    def _hear(self) -> Called | None:
        """What the next rank has published so far."""
        while (news := self._log.more_of(self._next, self._num_heard + 1)) is not None:
            self._heard, self._num_heard = merged(self._heard, news), self._num_heard + 1
        try:
            found: Called = checked(self._heard, Called, world_size=self._log.world_size, sender=self._next)
        except ValueError:  # as if the peer had written nothing
            return None
        return found

    def at_the_end(self) -> bool:
        """Compare variants with all ranks, waiting for them, and counters with what the neighbours have published.

        True where a different rank has found that variants differ.
        """
        self._is_over = True
        called = called_by(self._progress, is_over=True)
        self._log.say_called(called, num_said=self._num_said)
        differs = bool(called.ran) and self._log.differ(called.sha, wait_s=_LEAVING_S)
        is_judge = differs and self._log.claim("ran")
        theirs = self._log.called_on(self._others if is_judge else self._neighbours)
        if self._next not in theirs and (heard := self._hear()) is not None:
            theirs[self._next] = heard
        self._compare(theirs, called)
        if is_judge:
            self._log.say_judged(has_parted=self._has_parted())
        return differs and not is_judge and self._log.judged(wait_s=_LEAVING_S)

    def _compare(self, theirs: Mapping[int, Called], mine: Called) -> None:
        by_rank = {**theirs, self._log.rank: mine}
        ran = {rank: called.ran for rank, called in by_rank.items()}
        self._on(Compared(ran, {rank: called.counted for rank, called in by_rank.items()}))
