"""pid and host of a rank -> is its process alive, as far as this host can tell."""

from __future__ import annotations

import os
import socket
from typing import Literal

Liveness = Literal["alive", "stopped", "dead", "unknown"]


def process_state(pid: int, host: str) -> Liveness:
    """`dead` also for a zombie, which a killed child of torchrun stays until it is reaped; `unknown` on another host."""
    if host != socket.gethostname():
        return "unknown"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        return "alive"
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:  # no procfs, or it ended just now
        return "unknown"
    return "dead" if letter in "ZX" else "stopped" if letter in "Tt" else "alive"
