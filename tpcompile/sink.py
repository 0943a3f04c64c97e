"""Messages of a part of the package -> stderr, whatever the loguru settings, and loguru if the program enabled it.

A library is silent in loguru until a program enables it. What a job must know although it goes on (the verdict of a
sentinel with policy="warn", fast paths that no rank uses because one cannot) must be visible without that, whatever
else the program imports.
"""

from __future__ import annotations

import sys
import traceback

from loguru import logger as _logger


class Sink:
    """Writes news, warnings and errors about one part of the package, with the rank once it is known."""

    def __init__(self, about: str) -> None:
        self._about = about
        self.rank: int | None = None

    def debug(self, message: str, *args: object) -> None:
        """Write to loguru only."""
        _logger.opt(depth=1).debug(message, *args)

    def info(self, message: str, *args: object) -> None:
        """Write a message about normal operation."""
        _logger.opt(depth=1).info(message, *args)
        self._print("INFO", message.format(*args))

    def warning(self, message: str, *args: object) -> None:
        """Write a warning: the job continues."""
        _logger.opt(depth=1).warning(message, *args)
        self._print("WARNING", message.format(*args))

    def error(self, message: str, *args: object, exception: BaseException | None = None) -> None:
        """Write an error, with the traceback of `exception`."""
        _logger.opt(depth=1, exception=exception).error(message, *args)
        self._print("ERROR", message.format(*args))
        if exception is not None:
            traceback.print_exception(exception, file=sys.stderr)

    def _print(self, level: str, text: str) -> None:
        rank = "" if self.rank is None else f"[rank {self.rank}] "
        # One write: the lines of ranks that share a terminal must not interleave.
        sys.stderr.write(f"{rank}tpcompile {self._about}, {level}: {text}\n")
        sys.stderr.flush()
