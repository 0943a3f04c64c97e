"""Frames of the main thread, flight recorder and progress -> the state of this rank; on any thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from tpcompile.ranks.liveness import host_name, this_host
from tpcompile.ranks.store import Line
from tpcompile.sentinel import flight
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.protocol import Protocol
from tpcompile.torch_api import watching
from tpcompile.torch_api.point_to_point import Messages, Posted


class Snapshot:
    """Reads the state of this process."""

    def __init__(self, protocol: Protocol, messages: Messages, *, main_thread: int) -> None:
        self._protocol, self._progress, self._main_thread = protocol, protocol.progress, main_thread
        self._messages = messages

    def state(self) -> RankState:
        """Current state of this rank."""
        progress = self._progress
        return state_of(
            self._main_frame(),
            begun=progress.calls_begun(),
            posted=self._messages.posted(),
            rank=self._protocol.rank,
            activity=progress.activity,
            since_s=time.monotonic() - progress.since,
            position=progress.position,
            compile_id=progress.compile_id,
            reason=progress.reason,
            waits_at=self._protocol.waits_at(),
            calls=progress.calls(),
        )

    def is_stuck(self, *, for_s: float) -> bool:
        """True when the main thread waits in communication, or a collective has been in flight for `for_s`."""
        if flight.is_blocked(self._main_frame()):
            return True
        return any(not issued.is_done and issued.age_s > for_s for issued in flight.recorded())

    def waits_in(self, line: Line) -> object | None:
        """What the main thread waits in, in communication or for the store; equal while it does not move."""
        frame = self._main_frame()
        is_waiting = flight.is_blocked(frame) or line.is_asking(self._main_thread)
        position = self._protocol.waits_at()
        if not is_waiting and position is None:
            return None
        return position, self._progress.ticks, tuple(issued.id for issued in flight.recorded())

    def _main_frame(self) -> FrameType | None:
        return watching.main_thread_frame(self._main_thread)


def state_of(
    frame: FrameType | None, *, begun: Sequence[flight.Begun] = (), posted: Sequence[Posted] = (), **known: Any
) -> RankState:
    """State of this process: `frame` is the innermost of its main thread, `known` what neither that nor torch knows."""
    members = watching.group_members()
    seen = {
        "in_dynamo": watching.is_in_dynamo(frame),
        "blocked": flight.is_blocked(frame),
        "stack": flight.user_stack(frame),
        "issued": flight.recorded(begun=begun),
        "host": host_name(this_host()),
        "calling": watching.group_waited_in(frame),
        "messages": flight.messages(posted),
        "p2p": flight.point_to_point(frame, posted),
        "groups": tuple(sorted(members)),
        "members": members,
        "cpu_s": time.monotonic() if watching.uses_gpu() else time.process_time(),
    }
    return RankState(**{**seen, **known})
