"""Status files of a run directory -> what every rank does: a live line on a terminal, a line every 30 s in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from tpcompile.errors import ConfigError
from tpcompile.evidence.rundir import RankStatus, RunDir
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.report.wording import plain

LIVE_EVERY_S = 0.5
"""Seconds between two updates of the live line."""
LOG_EVERY_S = 30.0
"""Seconds between two lines in a log."""


class Progress:
    """Reports what the ranks do while they run, on `console`; used as a context manager."""

    def __init__(
        self,
        run_dir: RunDir,
        world_size: int,
        console: Console,
        *,
        is_quiet: bool = False,
        every_s: float | None = None,
    ) -> None:
        self._run_dir, self._world_size, self._console = run_dir, world_size, console
        usual_s = LIVE_EVERY_S if console.is_terminal else LOG_EVERY_S
        self._every_s = usual_s if every_s is None else every_s
        self._is_quiet = is_quiet
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tpcompile-progress", daemon=True)
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        if not self._is_quiet:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._done.set()
        if not self._is_quiet:
            self._thread.join(timeout=10)

    def show(self, text: str) -> None:
        """Print a line of the ranks above the live line."""
        with suppress(OSError):
            self._console.print(Text(plain(text)), soft_wrap=True)

    def _run(self) -> None:
        with ExitStack() as stack, suppress(OSError):  # a closed stderr costs the progress, not the run
            live = stack.enter_context(self._console.status(self._text())) if self._console.is_terminal else None
            while not self._done.wait(self._every_s):
                self._tell(live)

    def _tell(self, live: Status | None) -> None:
        text = self._text()
        if live is None:
            self._console.print(text, soft_wrap=True)
        else:
            live.update(text)

    def _text(self) -> Text:
        statuses: Sequence[RankStatus] = ()
        with suppress(ConfigError, ValueError):
            statuses = self._run_dir.read_statuses()
        return Text(plain(progress_line(statuses, self._world_size, time.monotonic() - self._started_s)))


def progress_line(statuses: Sequence[RankStatus], world_size: int, after_s: float) -> str:
    """`12 s: ranks 0-2: C/first, compiling 0/0; rank 3: starting`: ranks that do the same are named together."""
    known = {status.rank: _doing(status) for status in statuses}
    alike: dict[str, list[int]] = {}
    for rank in range(world_size):
        alike.setdefault(known.get(rank, "starting"), []).append(rank)
    parts = [f"{named_ranks(ranks)}: {doing}" for doing, ranks in alike.items()]
    return f"{after_s:.0f} s: {'; '.join(parts)}"


def _doing(status: RankStatus) -> str:
    return status.phase if status.state == "running" else f"{status.phase}, {status.state}"
