"""A job that runs -> how each of its ranks ended, within the limit of the job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from tpcompile.pytest_plugin.causes import RankEnd
from tpcompile.pytest_plugin.files import ERROR, STREAMS, Job, read_text
from tpcompile.pytest_plugin.session import HAS_ENDED, Running

_POLL_S = 0.02
_GRACE_S = 3.0
"""Least seconds that the other ranks have to fail by themselves after one rank failed."""
_ENDING_S = 10.0
"""A rank that is stopped ends within this time."""


class Watch:
    """Reads the files of a job until all its ranks have ended."""

    def __init__(self, job: Job, running: Running) -> None:
        self._files, self._running = job.files, running
        self._ranks = [RankEnd(rank) for rank in range(job.world_size)]
        self._read_lines = [0] * job.world_size
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + job.timeout_s
        self._has_failed = False

    def ends(self) -> list[RankEnd]:
        """How each rank ended."""
        try:
            while self._step() and self._running.is_served(_POLL_S):
                pass
        except BaseException:  # Ctrl-C
            self._stop([rank for rank in self._ranks if rank.exit_code is None], is_late=False)
            raise
        is_served = self._running.is_served()  # first: what the server wrote before its end is there then
        for end in self._ranks:
            self._read(end)
            end.stack = read_text(self._files.stack(end.rank))
            for stream in STREAMS:
                whole = read_text(self._files.output(end.rank, stream))
                reported = 0
                for when, report in end.reports.items():
                    texts = [text for name, text in report["sections"] if name == f"Captured {stream} {when}"]
                    reported += sum(map(len, texts))
                end.unreported[stream] = whole[reported:]
            if end.exit_code is None and not is_served:
                end.error = end.error or f"lost their server: {HAS_ENDED}"
        return self._ranks

    def _step(self) -> bool:
        """Look once; False when all ranks have ended."""
        for end in self._ranks:
            self._read(end)
        alive = [end for end in self._ranks if end.exit_code is None]
        in_body = [end for end in alive if not end.has_called]
        now_s = time.monotonic()
        has_failed = any(end.has_failed for end in self._ranks)
        if has_failed and not self._has_failed:
            self._has_failed = True
            self._shorten_limit(now_s)
        if now_s > self._deadline_s:
            self._stop(alive, is_late=not has_failed)
        if not in_body and not self._files.go.exists():
            self._files.go.touch()
            self._shorten_limit(now_s)
        return bool(alive) and now_s < self._deadline_s + _ENDING_S

    def _shorten_limit(self, now_s: float) -> None:
        """Give the other ranks, after a failure, as long again as the test had run, and once more for the teardown."""
        if self._has_failed:
            took_s = now_s - self._began_s
            self._deadline_s = min(self._deadline_s, now_s + max(_GRACE_S, took_s))

    def _stop(self, ends: Iterable[RankEnd], *, is_late: bool) -> None:
        new = [end for end in ends if not end.is_late and not end.is_stopped]
        for end in new:
            end.is_late, end.is_stopped = is_late, not is_late
        self._running.stop([end.rank for end in new])

    def _read(self, end: RankEnd) -> None:
        lines = read_text(self._files.reports(end.rank)).split("\n")[:-1]
        for line in lines[self._read_lines[end.rank] :]:
            fields = json.loads(line)
            if ERROR in fields:
                end.error = end.error or fields[ERROR]
            else:
                end.reports[fields["when"]] = fields
        self._read_lines[end.rank] = len(lines)
        end.exit_code = self._running.codes[end.rank]  # from before the look: what it wrote before its end is there
