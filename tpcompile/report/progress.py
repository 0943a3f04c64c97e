"""Status files of a run directory -> what every rank does: a bar on a terminal, a line every 15 s in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from tpcompile.errors import ConfigError
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.rundir import RankStatus, RunDir
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.report.wording import plain

LIVE_EVERY_S = 0.5
"""Seconds between two updates of the bar."""
LOG_EVERY_S = 15.0
"""Seconds between two lines in a log."""


class Progress:
    """Reports what the ranks do while they run, on `console`; used as a context manager."""

    def __init__(
        self,
        run_dir: RunDir,
        world_size: int,
        console: Console,
        *,
        phases: Sequence[str] = (),
        is_quiet: bool = False,
        every_s: float | None = None,
    ) -> None:
        """`phases` are those of the run, in order: the bar shows how many of them every rank has ended."""
        self._run_dir, self._world_size, self._console, self._phases = run_dir, world_size, console, phases
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

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if not self._is_quiet:
            self._thread.join(timeout=10)

    def show(self, text: str) -> None:
        """Print a line of the ranks above the bar."""
        with suppress(OSError):
            self._console.print(Text(plain(text)), soft_wrap=True)

    def _run(self) -> None:
        with suppress(OSError):  # a closed stderr costs the progress, not the run
            if self._console.is_terminal:
                self._in_bar()
            while not self._done.wait(self._every_s):
                self._console.print(self._text(self._statuses()), soft_wrap=True)

    def _in_bar(self) -> None:
        columns = BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}", markup=False)
        num_done = 0
        with Bar(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(str(self._text(())), total=len(self._phases))
            while not self._done.wait(self._every_s):
                statuses = self._statuses()
                num_done = max(num_done, num_ended(statuses, self._world_size, self._phases))
                bar.update(task, completed=num_done, description=str(self._text(statuses)))

    def _statuses(self) -> Sequence[RankStatus]:
        with suppress(ConfigError, ValueError):
            return self._run_dir.read_statuses()
        return ()

    def _text(self, statuses: Sequence[RankStatus]) -> Text:
        started = {status.rank for status in statuses}
        starting = {rank: self._run_dir.read_start(rank) for rank in range(self._world_size) if rank not in started}
        after_s = time.monotonic() - self._started_s
        return Text(plain(progress_line(statuses, self._world_size, after_s, starting=starting)))


def num_ended(statuses: Sequence[RankStatus], world_size: int, phases: Sequence[str]) -> int:
    """How many of the phases every rank has ended."""
    if len(statuses) < world_size:
        return 0
    places = {phase: number for number, phase in enumerate(phases)}
    num_phases = len(places)
    ended = [num_phases if one.state == "finished" else places.get(one.phase, 0) for one in statuses]
    return min(ended, default=0)


def progress_line(
    statuses: Sequence[RankStatus], world_size: int, after_s: float, *, starting: Mapping[int, str]
) -> str:
    """`12 s: ranks 0-2: C/first, compiling 0/0; rank 3: starting, imports torch`; ranks that do the same are named
    together. `starting` is what ranks without a status were last known to do, "" for nothing."""
    doing = {rank: f"starting, {starting.get(rank) or 'no process yet'}" for rank in range(world_size)}
    for status in statuses:
        doing[status.rank] = status.phase if status.state == "running" else f"{status.phase}, {status.state}"
    alike = grouped(range(world_size), doing.__getitem__)
    parts = [f"{named_ranks(ranks)}: {what}" for what, ranks in alike.items()]
    return f"{after_s:.0f} s: {'; '.join(parts)}"
