"""Which compiled variants ran here and on other ranks -> a finding; on the timer's thread, and when a rank leaves.

Every rank compares with the next one only, so its cost does not grow with their number; of ranks that do not all agree,
two that are next to each other differ. Nothing is sent while every region has one variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tpcompile.sentinel.hang import Finding
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.store_log import StoreLog
from tpcompile.sentinel.variants import Ran, ran_by, wrong_variant

_LEAVING_S = 2.0


class Comparison:
    """Of one rank."""

    def __init__(self, log: StoreLog, progress: Progress, *, raise_: Callable[[Finding], None]) -> None:
        self._log, self._progress, self._raise = log, progress, raise_
        self._told: Mapping[str, Ran] = {}
        members = log.members
        self._next = members[(members.index(log.rank) + 1) % len(members)]

    def with_the_next(self) -> None:
        """Tell what ran since the last time, and compare with the next rank; nothing to do in most jobs."""
        ran = ran_by(self._progress)
        if not ran or ran == self._told or len(self._log.members) == 1:
            return
        self._told = ran
        self._log.say_ran(ran, is_all=False)
        self._judge(self._log.ran_on([self._next], wait_s=0.0), ran)

    def at_the_end(self) -> bool:
        """Compare with all ranks; True when they differ."""
        ran = ran_by(self._progress)
        if not ran or len(self._log.members) == 1:
            return False
        self._log.say_ran(ran, is_all=True)
        others = [rank for rank in self._log.members if rank != self._log.rank]
        return self._judge(self._log.ran_on(others, wait_s=_LEAVING_S), ran)

    def _judge(self, theirs: Mapping[int, Mapping[str, Ran]], ran: Mapping[str, Ran]) -> bool:
        finding = wrong_variant({**theirs, self._log.rank: ran})
        if finding is not None:
            self._raise(finding)
        return finding is not None
