"""Ranks that were forked from this process -> which have ended, and how; what they leave behind is ended as well."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress


def ended(left: Mapping[int, int]) -> list[tuple[int, int]]:
    """Rank -> process: the ranks that have ended, with their exit codes, negative for a signal. Does not wait."""
    found = []
    for rank, pid in left.items():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            found.append((rank, code))
    return found


def sweep_group(pid: int) -> None:
    """End what a rank has left behind in its process group, a compiler for example."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
