"""Sinks of the package's log lines: `setup` for our own programs, `kept` for one run; importing adds none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from loguru import logger


def setup(*, rank: int, verbose: bool = False) -> None:
    """Send warnings of this rank to stderr, and on rank 0 with `verbose` info too; removes all other sinks.

    Only for the command line and the scripts in repro/: a library must not remove the sinks of its program.
    """
    logger.enable("tpcompile")
    logger.remove()
    level = "INFO" if verbose and rank == 0 else "WARNING"
    logger.add(sys.stderr, level=level, format=f"[rank {rank}] {{level}}: {{message}}", diagnose=False)


class LogFile:
    """A file of log lines. A full or missing disk loses lines and raises nothing."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO | None = None
        with suppress(OSError):
            self._file = path.open("a", encoding="utf-8")

    def write(self, text: str) -> None:
        """Append the text at once; loguru calls it with a line."""
        if self._file is not None:
            with suppress(OSError):
                self._file.write(text)
                self._file.flush()

    def close(self) -> None:
        """No line will follow."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


@contextmanager
def kept(folder: Path, *, rank: int) -> Iterator[None]:
    """Write the package's log lines to `folder/rank_N.jsonl`; empty unless the program enabled the package."""
    file = LogFile(folder / f"rank_{rank}.jsonl")
    sink = logger.add(file, level="DEBUG", filter="tpcompile", serialize=True, diagnose=False)
    try:
        yield
    finally:
        logger.remove(sink)
        file.close()
