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

_STILL_S = 1.0
"""Seconds at one place, with a message in flight, after which a main thread with work on its GPU waits for that."""


class Snapshot:
    """Reads the state of this process."""

    def __init__(self, protocol: Protocol, messages: Messages, *, main_thread: int) -> None:
        self._protocol, self._progress, self._main_thread = protocol, protocol.progress, main_thread
        self._messages = messages
        self._place: object = None
        """Where the main thread was when it was looked at last, and since when."""
        self._at_place_since_s = 0.0

    def state(self) -> RankState:
        """Current state of this rank."""
        progress, frame = self._progress, self._main_frame()
        return state_of(
            frame,
            is_held=self._is_held(frame),
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
        """True when the main thread is held, or a collective has been in flight for `for_s`."""
        if self._is_held(self._main_frame()):
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

    def _is_held(self, frame: FrameType | None) -> bool:
        """True when the main thread waits in communication, or for its GPU behind a send or receive.

        `x.item()` behind a receive of NCCL, which has returned, is no frame of torch: the thread has not moved between
        two looks, and its GPU has work.
        """
        if flight.is_blocked(frame):
            return True
        if frame is None or not flight.has_message_in_flight(for_s=_STILL_S):
            return False
        now_s = time.monotonic()
        stack = [(one.f_code, one.f_lasti) for one in watching.frames_from(frame)]
        done = [one.id for one in flight.recorded()], [one.at_ns for one in self._messages.posted()[-1:]]
        place = (stack, done)  # a loop comes to the same place again, and has done more by then
        if place != self._place:
            self._place, self._at_place_since_s = place, now_s
        return now_s - self._at_place_since_s > _STILL_S and watching.has_gpu_work()

    def _main_frame(self) -> FrameType | None:
        return watching.main_thread_frame(self._main_thread)


def state_of(
    frame: FrameType | None,
    *,
    is_held: bool,
    begun: Sequence[flight.Begun] = (),
    posted: Sequence[Posted] = (),
    **known: Any,
) -> RankState:
    """State of this process: `frame` is the innermost of its main thread, which `is_held` in communication or not;
    `known` is what neither that nor torch knows."""
    members = watching.group_members()
    p2p = flight.point_to_point(frame, posted, is_held=is_held)
    seen = {
        "in_dynamo": watching.is_in_dynamo(frame),
        "blocked": is_held,
        "stack": flight.user_stack(frame),
        "issued": flight.recorded(begun=begun),
        "host": host_name(this_host()),
        "calling": watching.group_waited_in(frame),
        "messages": flight.messages(posted, p2p),
        "p2p": p2p,
        "groups": tuple(sorted(members)),
        "members": members,
        "cpu_s": time.monotonic() if watching.uses_gpu() else time.process_time(),
    }
    return RankState(**{**seen, **known})
