"""What a rank executes before it is watched: recorded from the import of `tpcompile.sentinel` on.

The setup of a program comes before its sentinel: settings are read, parameters frozen, hooks registered there. Where
ranks differ later, the line is often among these.
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import threading
from collections.abc import Iterable, Mapping

from tpcompile.recording.flow import IS_POSSIBLE, FlowRecorder

_SPAWNED = "--multiprocessing-fork"
"""Argument of the Pythons that `multiprocessing` spawns."""
_RECORDERS: list[FlowRecorder] = []
"""That of this process, until something goes on with it."""


def is_rank(variables: Mapping[str, str]) -> bool:
    """True for the environment of one of several ranks."""
    size = variables.get("WORLD_SIZE", "")
    return "RANK" in variables and size.isdecimal() and int(size) > 1


def begin() -> None:
    """Record from here on, in a process that a launcher has started as one of several ranks, on its main thread.

    Only by `sys.monitoring`: `sys.settrace` is for those who ask for it. A worker that a rank has spawned is no rank,
    though it has the variables of its parent, and imports the parent's program.
    """
    is_main = threading.current_thread() is threading.main_thread() and _SPAWNED not in sys.orig_argv
    if _RECORDERS or not (is_rank(os.environ) and is_main and IS_POSSIBLE):
        return
    recorder = FlowRecorder()
    if recorder.start(secrets.token_hex(8)):
        recorder.stop()
        return
    _RECORDERS.append(recorder)
    atexit.register(end)


def end() -> None:
    """End what was begun here, where nothing has gone on with it."""
    while _RECORDERS:
        _RECORDERS.pop().stop()


def recorder(follow: Iterable[str] = ()) -> FlowRecorder:
    """What was begun here, to go on with `start`, or a new one; a process has one recording."""
    if _RECORDERS and threading.current_thread() is threading.main_thread():
        found = _RECORDERS.pop()
        found.follow(follow)
        return found
    end()
    return FlowRecorder(follow)


os.register_at_fork(after_in_child=_RECORDERS.clear)
