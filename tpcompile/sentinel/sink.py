"""What the sentinel reports -> stderr, whatever the program did to loguru, and loguru for a program that enabled it.

A library is silent in loguru until a program enables it. The verdict of a sentinel with policy="warn" must be seen
without that, and whatever else the program imports.
"""

from __future__ import annotations

import sys
import traceback

from loguru import logger as _logger


class Sink:
    """Warnings and errors for a person; the rank once it is known."""

    def __init__(self) -> None:
        self.rank: int | None = None

    def debug(self, message: str, *args: object) -> None:
        """Only for a program that enabled the package."""
        _logger.opt(depth=1).debug(message, *args)

    def warning(self, message: str, *args: object) -> None:
        """The job goes on."""
        _logger.opt(depth=1).warning(message, *args)
        self._print("WARNING", message.format(*args))

    def error(self, message: str, *args: object, exception: BaseException | None = None) -> None:
        """Something failed; with its traceback."""
        _logger.opt(depth=1, exception=exception).error(message, *args)
        self._print("ERROR", message.format(*args))
        if exception is not None:
            traceback.print_exception(exception, file=sys.stderr)

    def _print(self, level: str, text: str) -> None:
        rank = "" if self.rank is None else f"[rank {self.rank}] "
        # One write: the lines of ranks that share a terminal must not interleave.
        sys.stderr.write(f"{rank}tpcompile sentinel, {level}: {text}\n")
        sys.stderr.flush()


logger = Sink()
