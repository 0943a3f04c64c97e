"""Lines that torchrun and its ranks write to stderr -> those to show; torchrun's own report of a failure is kept back.

When a rank ends with an error, torchrun logs which ranks it stops and raises ChildFailedError: some forty lines that
name exit code 1 and not the cause, below the verdict that names it. Before it come warnings of torch on each rank, a
dozen lines for a graph break. Who has set TORCH_LOGS sees these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tpcompile.logs import LogFile

_LOGGED = re.compile(r"^[IWEF]\d{4} \S+ \d+ torch/distributed/(elastic/|run\.py)")
"""A line of torchrun's logger."""
_WARNED = re.compile(r"^(\[rank\d+\]:)?[IW]\d{4} \S+ \d+ torch/")
"""A line of a warning of torch."""
_RAISED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
_TRACEBACK = "Traceback (most recent call last):"
_RULE = re.compile(r"^=+$")
_NUM_RULES = 2
"""The report stands between two lines of `=`."""


class Folded:
    """Keeps torchrun's report back: `feed` takes a line and returns the lines to show now, `rest` those at the end."""

    def __init__(self, *, with_warnings: bool = False) -> None:
        self._kept_back = _LOGGED if with_warnings else re.compile(f"{_LOGGED.pattern}|{_WARNED.pattern}")
        self.hidden: list[str] = []
        """Lines that were kept back."""
        self._traceback: list[str] = []
        """Lines of a traceback whose exception is not known yet."""
        self._rules_left = 0
        """Lines of `=` before the end of a report that has begun."""

    def feed(self, line: str) -> list[str]:
        """The lines to show after this one."""
        if self._rules_left:
            self.hidden.append(line)
            self._rules_left -= bool(_RULE.match(line))
            return []
        if self._traceback:
            return self._in_traceback(line)
        if line == _TRACEBACK:
            self._traceback = [line]
            return []
        if self._kept_back.match(line):
            self.hidden.append(line)
            return []
        return [line]

    def rest(self) -> list[str]:
        """Lines of a traceback that was cut off."""
        cut_off, self._traceback = self._traceback, []
        return cut_off

    def _in_traceback(self, line: str) -> list[str]:
        is_frame = line.startswith(" ") and line != _TRACEBACK
        if is_frame:
            self._traceback.append(line)
            return []
        held = self.rest()
        if line.startswith(_RAISED):
            self.hidden += [*held, line]
            self._rules_left = _NUM_RULES
            return []
        return [*held, *self.feed(line)]


class TorchrunLog:
    """Writes all that torchrun and its ranks print to a file, and shows it without torchrun's own report."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        self.path = path
        self._show = show
        self._folded = Folded(with_warnings="TORCH_LOGS" in os.environ)
        self._file = LogFile(path)
        self._is_muted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._folded.rest():
            self._show_unless_muted(line)
        self._file.close()

    def mute(self) -> None:
        """Show nothing from now on: lines are still written to the file."""
        self._is_muted = True

    def line(self, text: str) -> None:
        """Take one line, without its newline."""
        self._file.write(f"{text}\n")
        for shown in self._folded.feed(text):
            self._show_unless_muted(shown)

    def _show_unless_muted(self, line: str) -> None:
        if not self._is_muted:
            self._show(line)

    @property
    def num_hidden(self) -> int:
        """Lines that were kept back."""
        return len(self._folded.hidden)

    def show_hidden(self) -> None:
        """Show what was kept back: where there is no verdict, it is all that is known."""
        for line in self._folded.hidden:
            self._show(line)
