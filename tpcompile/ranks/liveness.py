"""pid and host of a rank -> state of its process, as far as this host can observe it."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from typing import Literal

Liveness = Literal["alive", "stopped", "dead", "unknown"]


@cache
def this_host() -> str:
    """Scope of a pid: the booted machine and its pid namespace; hostnames alone can repeat between containers."""
    name = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{name} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # no procfs
        return name


def host_name(host: str) -> str:
    """The name in what `this_host` gave, without its domain; empty for an empty one."""
    return host.partition(" ")[0].partition(".")[0]


def process_state(pid: int, host: str) -> Liveness:
    """State of a process; `host` is `this_host()` of its rank. `unknown` on a different host.

    A zombie is `dead`: a killed child of torchrun is one until it is reaped.
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
    if letter in "ZX":
        return "dead"
    return "stopped" if letter in "Tt" else "alive"
