"""Where log lines go: the library stays silent until an application calls `setup`."""

from __future__ import annotations

import sys
from pathlib import Path

from loguru import logger

logger.disable("tpcompile")


def setup(*, rank: int, log_dir: Path | None = None, verbose: bool = False) -> None:
    """Send this rank's records to `log_dir/rank_N.jsonl`, warnings (rank 0: also info when `verbose`) to stderr."""
    logger.enable("tpcompile")
    logger.remove()
    logger.configure(extra={"rank": rank})
    level = "INFO" if verbose and rank == 0 else "WARNING"
    logger.add(sys.stderr, level=level, format="[rank {extra[rank]}] {level}: {message}", diagnose=False)
    if log_dir is not None:
        logger.add(log_dir / f"rank_{rank}.jsonl", level="DEBUG", serialize=True, diagnose=False)
