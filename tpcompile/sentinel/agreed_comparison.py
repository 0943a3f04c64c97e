"""Values that this rank and others said are equal -> an event; on the timer's thread, and when a rank leaves.

As `comparison`, with the next rank alone while the job runs, and with both neighbours at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from tpcompile.sentinel.agreed_board import AgreedBoard
from tpcompile.sentinel.agreed_values import AgreedValues
from tpcompile.sentinel.agreement import Links, Span
from tpcompile.sentinel.events import Compared, Event, Recalled
from tpcompile.sentinel.log_entries import AskValues
from tpcompile.sentinel.store_log import StoreLog

_LEAVING_S, _ANSWER_S = 2.0, 2.0


class AgreedComparison:
    """Sends and reads links of the chain of values, and the values where these differ, for one rank."""

    def __init__(self, log: StoreLog, agreed: AgreedValues, *, on: Callable[[Event], None]) -> None:
        self._log, self._board, self._agreed, self._on = log, AgreedBoard(log), agreed, on
        self._links = Links()
        """Those that this rank has published."""
        self._is_next_behind = False
        """The next rank had fewer values than this one when they were compared."""
        members = log.members
        here = members.index(log.rank)
        self._next = members[(here + 1) % len(members)]
        self._neighbours = sorted({self._next, members[here - 1]} - {log.rank})

    def with_the_next(self) -> None:
        """Publish links where there are new values, and compare with the next rank."""
        links = self._agreed.links()
        is_old = links == self._links and not self._is_next_behind
        if not self._neighbours or is_old:
            return
        if links != self._links:
            self._board.say_links(links)
            self._links = links
        theirs = self._board.links_on([self._next], is_over=False)
        self._is_next_behind = any(one.num < links.num for one in theirs.values()) or not theirs
        self._on(Compared({}, {}, {**theirs, self._log.rank: links}))

    def at_the_end(self) -> None:
        """Compare with the neighbours, waiting for them if this rank has values; without values it says so."""
        self._agreed.settle(waits=True)
        links = self._agreed.links(is_over=True)
        if not self._neighbours:
            return
        if links.num:
            self._board.keep_values(self._agreed.newest())
        self._board.say_links(links)
        theirs = self._board.links_on(self._neighbours, is_over=True, wait_s=_LEAVING_S) if links.num else {}
        for rank, one in theirs.items():
            self._on(Compared({}, {}, {rank: one, self._log.rank: links}, is_last=True))

    def recall(self, span: Span, here: list[int], *, wait_s: float) -> None:
        """Ask the ranks that are here for their values in the span, and read those that the others have left.

        A rank that leaves waits for the ends of the others: a majority is one of all.
        """
        over = self._board.links_on(self._log.members, is_over=True, wait_s=wait_s)
        ask = self._board.new_ask()
        self._log.append(AskValues, number=ask, span=span)
        others = [rank for rank in here if rank != self._log.rank]
        found = self._board.values_told(ask, others, timeout_s=_ANSWER_S)
        found |= self._board.values_kept([rank for rank in self._log.members if rank not in found])
        nums = {rank: links.num for rank, links in over.items()}
        self._on(Recalled(span, {**found, self._log.rank: self._agreed.values(span)}, nums))

    def tell(self, ask: int, span: Span) -> None:
        """Answer such a question of a different rank."""
        self._board.tell_values(ask, self._agreed.values(span))
