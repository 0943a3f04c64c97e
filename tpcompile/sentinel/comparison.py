"""What ran on this rank and on other ranks -> an event; on the timer's thread, and when a rank leaves.

On the timer every rank compares with the next rank only, so that the cost does not grow with the number of ranks: if
not all ranks agree, at least two neighbours differ. Nothing is sent while no region is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tpcompile.sentinel.agreed_values import AgreedValues
from tpcompile.sentinel.agreement import Links
from tpcompile.sentinel.counter_samples import Counted
from tpcompile.sentinel.events import Compared, Event
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.store_log import StoreLog
from tpcompile.sentinel.variants import Ran, ran_by

_LEAVING_S = 2.0


class Comparison:
    """Sends and reads what ran, for one rank."""

    def __init__(self, log: StoreLog, progress: Progress, agreed: AgreedValues, *, on: Callable[[Event], None]) -> None:
        self._log, self._progress, self._agreed, self._on = log, progress, agreed, on
        self._published: tuple[Mapping[str, Ran], Mapping[str, Counted]] = ({}, {})
        self._links = Links()
        """Those that this rank has published."""
        self._is_next_behind = False
        """The next rank had fewer values than this one when they were compared."""
        members = log.members
        here = members.index(log.rank)
        self._next, previous = members[(here + 1) % len(members)], members[here - 1]
        self._others = [rank for rank in members if rank != log.rank]
        self._neighbours = sorted({self._next, previous}.intersection(self._others))
        self._is_over = False
        """This rank leaves; the timer may still tick once."""

    def with_the_next(self) -> None:
        """Publish what ran since the last call, and compare with the next rank; nothing while no region is called."""
        if self._others:
            self._compare_ran()
            self._compare_agreed()

    def _compare_agreed(self) -> None:
        links = self._agreed.links()
        if links == self._links and not self._is_next_behind:
            return
        if links != self._links:
            self._log.say_links(links)
            self._links = links
        theirs = self._log.links_on([self._next], is_over=False)
        self._is_next_behind = any(one.num < links.num for one in theirs.values()) or not theirs
        self._on(Compared({}, {}, {**theirs, self._log.rank: links}))

    def _compare_ran(self) -> None:
        ran = ran_by(self._progress)
        counted = self._progress.counted(is_over=self._is_over)
        before, self._published = self._published, (ran, counted)
        if before == self._published:
            return
        if ran != before[0]:
            self._log.say_ran(ran, is_all=False)
        if counted != before[1]:
            self._log.say_counted(counted)
        theirs_ran = self._log.ran_on([self._next], wait_s=0.0) if ran else {}
        theirs_counted = self._log.counted_on([self._next])
        self._compare(theirs_ran, theirs_counted, ran=ran, counted=counted)

    def at_the_end(self) -> None:
        """Compare variants with all ranks, waiting for them, and counters with what the neighbours have published."""
        self._is_over = True
        ran, counted = ran_by(self._progress), self._progress.counted(is_over=True)
        theirs_ran: Mapping[int, Mapping[str, Ran]] = {}
        if ran:
            self._log.say_ran(ran, is_all=True)
            theirs_ran = self._log.ran_on(self._others, wait_s=_LEAVING_S)
        if counted:
            self._log.say_counted(counted)
        self._compare(theirs_ran, self._log.counted_on(self._neighbours), ran=ran, counted=counted)
        self._compare_agreed_at_the_end()

    def _compare_agreed_at_the_end(self) -> None:
        """Compare with the neighbours, waiting for them if this rank has values; without values it says so."""
        self._agreed.settle(waits=True)
        links = self._agreed.links(is_over=True)
        if not self._others:
            return
        if links.num:
            self._log.keep_values(self._agreed.newest())
        self._log.say_links(links)
        theirs = self._log.links_on(self._neighbours, is_over=True, wait_s=_LEAVING_S) if links.num else {}
        for rank, one in theirs.items():
            self._on(Compared({}, {}, {rank: one, self._log.rank: links}, is_last=True))

    def _compare(
        self,
        theirs_ran: Mapping[int, Mapping[str, Ran]],
        theirs_counted: Mapping[int, Mapping[str, Counted]],
        *,
        ran: Mapping[str, Ran],
        counted: Mapping[str, Counted],
    ) -> None:
        here = self._log.rank
        self._on(Compared({**theirs_ran, here: ran}, {**theirs_counted, here: counted}))
