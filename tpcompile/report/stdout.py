"""Text -> stdout, which may be a closed pipe (`| head`) or a file on a full disk: the exit code stays the verdict's."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def open_missing() -> None:
    """Give a process that was started without stdout or stderr (`>&-`) one that leads nowhere.

    Without, Python has None there, and the next file that is opened takes the number, with all that ranks print.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


@contextmanager
def forgiving() -> Iterator[None]:
    """Context for all that is printed: a stdout that cannot be written costs the text, and one line on stderr."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        _drop(error)


def say(text: str) -> None:
    """Print a line."""
    with forgiving():
        print(text, flush=True)


def _drop(error: OSError) -> None:
    """Discard unwritten text: Python would fail on it again at the end of the process."""
    if error.errno != errno.EPIPE:  # `| head` closes the pipe on purpose
        with suppress(OSError):
            print(f"error: cannot write to stdout: {error.strerror}", file=sys.stderr)
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
