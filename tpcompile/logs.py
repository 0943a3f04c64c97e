"""Where log lines go: `setup` for our own programs, `kept` for one run; a library adds no sink and removes none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loguru import logger


def setup(*, rank: int, verbose: bool = False) -> None:
    """Warnings of this rank go to stderr, and nowhere else (rank 0: also info when `verbose`).

    For the command line and the scripts in repro/ only: the sinks of the program go.
    """
    logger.enable("tpcompile")
    logger.remove()
    level = "INFO" if verbose and rank == 0 else "WARNING"
    logger.add(sys.stderr, level=level, format=f"[rank {rank}] {{level}}: {{message}}", diagnose=False)


@contextmanager
def kept(folder: Path, *, rank: int) -> Iterator[None]:
    """Write what this package logs to `folder/rank_N.jsonl`, too; empty unless the program enabled the package."""
    path = folder / f"rank_{rank}.jsonl"
    sink = logger.add(path, level="DEBUG", filter="tpcompile", serialize=True, diagnose=False)
    try:
        yield
    finally:
        logger.remove(sink)
