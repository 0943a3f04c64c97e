"""A rank that waits, and a job's store that does not answer -> this node is cut off: looked for on a thread of its own.

Every other thread of the sentinel talks to the store, and waits with it. A program that goes on is left alone: only the
store may be gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.node import ranks_here
from tpcompile.ranks.store import Line
from tpcompile.sentinel.describe import clock_text, describe
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import RankState

_LOOK_S = 1.0


class Reach:
    """Calls `lost` once, with the seconds for which neither the store has answered nor this rank has moved."""

    def __init__(
        self, line: Line, *, limit_s: float, place: Callable[[], object | None], lost: Callable[[float], None]
    ) -> None:
        """`place` is where this rank waits for others, equal while it does not move; None where it does not wait."""
        self._line, self._limit_s, self._place, self._lost = line, limit_s, place, lost
        self._done = threading.Event()
        self._here: object | None = None
        self._here_since_s = 0.0
        self._thread = threading.Thread(target=self._run, name="tpcompile-sentinel-reach", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for it: a block that has ended leaves none."""
        self._done.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._done.wait(_LOOK_S):
            silent_s = self.silent_s(time.monotonic())
            if silent_s >= self._limit_s:
                self._lost(silent_s)
                return

    def silent_s(self, now_s: float) -> float:
        """Seconds for which nothing has been heard of the other nodes, neither through the store nor otherwise."""
        since_s = self._line.silent_since()
        here = None if since_s is None else self._place()
        if here is None or here != self._here:
            self._here, self._here_since_s = here, now_s
        return 0.0 if since_s is None or here is None else now_s - max(since_s, self._here_since_s)


def cut_off(state: RankState, *, silent_s: float) -> Finding:
    """The finding of a rank that waits for ranks of nodes that it cannot reach."""
    mine = ranks_here(state.rank)
    away = tuple(sorted(rank for rank in state.waits_with if rank not in mine))
    place = os.environ.get("MASTER_ADDR", "rank 0")
    since = clock_text(time.time() - silent_s, for_s=silent_s)
    says = f"{place}, which serves the job's store, is unreachable since {since}"
    if 0 in mine:
        says = f"the job's store, which this node serves, has not answered since {since}"
    if away:
        says += f"; not heard of: {named_ranks(away)}"
    return Finding(
        Cause.STOPPED_RESPONDING, says, away, state.wait_line, (describe(state),), gone=away, is_rank_known=bool(away)
    )
