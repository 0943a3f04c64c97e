"""pid and host of a rank -> is its process alive, as far as this host can tell."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from typing import Literal

Liveness = Literal["alive", "stopped", "dead", "unknown"]


@cache
def this_host() -> str:
    """Where a pid means something: the booted machine and its pid namespace. Names of hosts and containers repeat."""
    name = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{name} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # no procfs
        return name


def process_state(pid: int, host: str) -> Liveness:
    """State of a process of `host`, a `this_host` of the rank it belongs to; `unknown` on another host.

    `dead` also for a zombie, which a killed child of torchrun stays until it is reaped.
    """
    if host != this_host():
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
