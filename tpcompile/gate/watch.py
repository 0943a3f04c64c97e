"""The thread that ends a run in which some rank hangs, has died or has failed.

A collective that waits for a dead rank cannot be interrupted from Python, so nothing here depends on the main
thread: the watch has its own store client, learns of SIGTERM through a pipe, and leaves with `os._exit`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping

from loguru import logger

from tpcompile.errors import ExitCode
from tpcompile.evidence.records import Check, CheckId, Status
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.ranks.signals import SigtermPipe
from tpcompile.ranks.store import RankStore

_POLL_S = 0.2
ALARM = "alarm"

LastWords = Callable[[Check], ExitCode]
"""Called once, on the watch's thread: write the record and the verdict, return the exit code of the process."""


class Watch:
    """Watches the alarm key, SIGTERM, the deadline of the current phase, and with `died` (rank -> what was last seen
    of it) the processes of the ranks, with `stuck` (the failed check, if any) whether this rank waits for too long,
    while used as a context manager. Both are called on the watch's thread.
    """

    def __init__(
        self,
        store: RankStore,
        last_words: LastWords,
        *,
        mode: str,
        died: Callable[[], Mapping[int, str]] = dict,
        stuck: Callable[[], Check | None] = lambda: None,
    ) -> None:
        self._store, self._last_words, self._mode = store, last_words, mode
        self._died, self._stuck = died, stuck
        self._deadline: float | None = None
        self._phase = ""
        self._done = threading.Event()
        self._ending = threading.Lock()
        self._signals = SigtermPipe()
        self._thread = threading.Thread(target=self._watch, name="tpcompile-watch", daemon=True)

    def __enter__(self) -> Watch:
        """Begin to watch; call it on the main thread, since Python sets signal handlers only there."""
        self._signals.install(self._thread, over_a_handler=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop watching, and leave signals as they were."""
        self.stop()
        self._signals.restore()

    def stop(self) -> None:
        """Stop watching: the main thread has taken over the ending. Does not return when the watch already ends it."""
        self._done.set()
        self._signals.hand_to(None)  # torchrun ends the ranks that are not done yet: the verdict is written first
        self._signals.wake()
        self._thread.join()

    def deadline(self, phase: str, seconds: float) -> None:
        """Set the deadline of the phase that begins now, `seconds` from now."""
        self._phase, self._deadline = phase, time.monotonic() + seconds

    def alarm(self, check: Check) -> Check:
        """Publish what went wrong to all ranks; the first alarm is the cause, and is returned."""
        return self._store.put_first(ALARM, check.model_dump(mode="json"), Check) or check

    def end(self, check: Check) -> None:
        """Raise the alarm, write the last words and leave the process. Does not return."""
        with self._ending:
            code = ExitCode.FAIL
            with contextlib.suppress(RuntimeError):  # the store went down with torchrun
                check = self.alarm(check)
            try:
                code = self._last_words(check)
            except Exception as error:  # whatever happens, the process must not stay
                logger.opt(exception=error).error("the final record could not be written")
            os._exit(code)

    def _watch(self) -> None:
        while not self._done.is_set():
            is_terminated = self._signals.terminated(timeout_s=_POLL_S)
            if self._done.is_set():
                return
            check = self._lost("torchrun stopped the job (SIGTERM)") if is_terminated else self._trouble()
            if check is not None and not self._done.is_set():
                self.end(check)

    def _trouble(self) -> Check | None:
        try:
            died = self._died()
            # After the processes: the rank that raised the alarm may end then.
            alarm: Check | None = self._store.peek(ALARM, Check)
        except RuntimeError:
            return self._lost("the job's store does not respond: torchrun, rank 0 or its node died")
        if alarm is not None:
            return alarm
        if died:
            seen = "; ".join(f"rank {rank}: {text}" for rank, text in died.items())
            return self._lost(f"{named_ranks(list(died))} died ({seen})", ranks=tuple(died))
        if self._deadline is not None and time.monotonic() > self._deadline:
            observed = f"phase {self._phase} did not end in time"
            return self._check(CheckId.TIMED_OUT, "every phase within gate.phase_timeout_s", observed)
        return self._stuck()

    def _lost(self, observed: str, *, ranks: tuple[int, ...] = ()) -> Check:
        return self._check(CheckId.ALIVE, "all ranks run to the end", observed, ranks=ranks)

    def _check(self, id: CheckId, expected: str, observed: str, *, ranks: tuple[int, ...] = ()) -> Check:
        return Check(id=id, mode=self._mode, status=Status.FAIL, expected=expected, observed=observed, ranks=ranks)
