"""Records the lines of user code that this process executes, and the values they set, through `sys.monitoring`.

Code of torch, of the standard library and of installed packages is looked at once, when it first starts, and costs
nothing after that. The callbacks are in C (flow.c, built once into a private folder); without a compiler they are in
Python, which costs 4 us an event instead of 0.19 (scripts/bench_flow.py). A process has one recording.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from loguru import logger

from tpcompile.errors import PreflightError
from tpcompile.evidence.text.lines import is_library_file, is_packaged
from tpcompile.evidence.timeline.flow import LINE_MASK, WATCHED, Flow
from tpcompile.recording.assigned import NOTHING, assigned
from tpcompile.recording.before import set_before
from tpcompile.recording.flow_callbacks import InPython, compiled
from tpcompile.recording.own_numbers import own_numbers
from tpcompile.recording.ring import Ring
from tpcompile.torch_api import watching
from tpcompile.torch_api.flags import num_function_modes

_PACKAGE = f"{Path(__file__).parents[1]}/"
_FAULTS = f"{_PACKAGE}gate/faults/"
"""They stand for a user's program."""
_TOOL = 3
"""A number of sys.monitoring that no debugger, profiler or coverage tool has by convention."""
_BUDGET, _BUDGET_IN_PYTHON = 40_000, 4_000
"""Events a second before frequent locations are silenced until the next second: 0.8 % of a core at 0.19 us each."""
_OFTEN = 200
"""Events of one location in a second, beyond which it may be silenced."""
_UNFOLLOWED = object()
_TENSORS = (torch.Tensor, torch.nn.Parameter, num_function_modes, torch.dtype, torch.device)
"""Tensors, whose shape, layout, dtype and need of a gradient are values, and whether a mode would see that; then
values by text."""
_YIELD, _RESUME = dis.opmap["YIELD_VALUE"], dis.opmap["RESUME"]
_MONITORING: Any = getattr(sys, "monitoring", None)
IS_POSSIBLE = _MONITORING is not None
"""`sys.monitoring` came with Python 3.12."""


class FlowRecorder:
    """Lines of the user's files, and of the packages in `follow`, from `start` to `stop`, on the thread that makes it.

    The threads of the autograd engine are followed as well: they run hooks.
    """

    def __init__(self, follow: Iterable[str] = ()) -> None:
        self._follow = tuple(follow)
        self._ring: Ring | None = None
        self._callbacks: Any = None
        """`InPython`, or the module in C; None while nothing is recorded."""
        self._ends: Callable[[], None] = lambda: None
        self._followed: list[CodeType] = []
        self._numbers: dict[str, int] = {}
        """Name of a region -> its number."""
        self._main_thread = threading.get_ident()
        self._pid = os.getpid()

    def start(self, name: str, *, by_settrace: bool = False) -> str:
        """Begin to record into the ring of that name; returns why it does not, empty when it does.

        Before Python 3.12 there is `sys.settrace` alone, which makes the user's code several times slower. What was set
        before is known without either. A recording that has started already goes on, in the ring of that name: what it
        has is then kept apart from what comes later, however much that is.
        """
        try:
            if self._ring is None:
                self._ring = Ring(name)
            else:
                self._ring.go_on(name)
        except (OSError, PreflightError) as error:
            return str(error)
        try:
            self._ring.keep_before(set_before(sys._getframe(1), self._is_followed))
        except Exception as error:  # an object of the user's may be odd in any way
            logger.debug("what was set before is not recorded: {}", error)
        if self._callbacks is not None:
            self._callbacks.know_own(tuple(own_numbers()))
            self.mark(WATCHED.function, 1)
            return ""
        why_not = _why_unavailable(by_settrace=by_settrace)
        if why_not:
            return why_not
        begin = self._monitor if IS_POSSIBLE else self._trace
        begin(self._ring, sys._getframe(1))
        _RECORDING.add(self)
        return ""

    def follow(self, packages: Iterable[str]) -> None:
        """Follow these packages as well from here on."""
        self._follow = tuple(packages)
        if self._follow and self._callbacks is not None:
            _MONITORING.restart_events()  # code of theirs that has started was disabled

    def _monitor(self, ring: Ring, frame: FrameType) -> None:
        monitoring, in_c = _MONITORING, compiled()
        callbacks = self._callbacks = in_c or InPython()
        callbacks.attach(
            ring.map, monitoring.DISABLE, monitoring.restart_events, self._follows_thread, self._first_start,
            _BUDGET if in_c else _BUDGET_IN_PYTHON, _OFTEN, *_TENSORS,
        )  # fmt: skip
        callbacks.know_own(tuple(own_numbers()))
        monitoring.use_tool_id(_TOOL, "tpcompile")
        events = monitoring.events
        monitoring.register_callback(_TOOL, events.PY_START, callbacks.on_start)
        monitoring.register_callback(_TOOL, events.LINE, callbacks.on_line)
        monitoring.register_callback(_TOOL, events.PY_RETURN, callbacks.on_return)
        for running in watching.frames_from(frame):  # these have started already
            self._first_start(running.f_code)
        monitoring.set_events(_TOOL, events.PY_START)
        monitoring.restart_events()  # code that an earlier recording has disabled

        def end() -> None:
            monitoring.set_events(_TOOL, 0)
            for code in self._followed:  # else Python 3.12 goes on to call back for it in a later recording
                monitoring.set_local_events(_TOOL, code, 0)
            self._followed.clear()
            monitoring.free_tool_id(_TOOL)

        self._ends = end

    def _trace(self, ring: Ring, frame: FrameType) -> None:
        callbacks = self._callbacks = InPython()
        callbacks.attach(
            ring.map, _UNFOLLOWED, lambda: None, self._follows_thread, self._first_start, 1 << 60, _OFTEN, *_TENSORS
        )
        callbacks.know_own(own_numbers())

        @torch.compiler.disable  # Dynamo looks at what a compiled frame calls, a trace function too
        def starts(frame: FrameType, _event: str, _value: Any) -> Any:
            code = frame.f_code
            if _is_suspended(frame):  # a generator that goes on
                return goes_on if callbacks.knows(code) else None
            return goes_on if callbacks.on_start(code, 0) is not _UNFOLLOWED else None

        @torch.compiler.disable
        def goes_on(frame: FrameType, event: str, value: Any) -> Any:
            if event == "line":
                callbacks.on_line(frame.f_code, frame.f_lineno)
            elif event == "return" and not _is_suspended(frame):
                callbacks.on_return(frame.f_code, 0, value)
            return goes_on

        for running in watching.frames_from(frame):
            if self._first_start(running.f_code) is not _UNFOLLOWED:
                running.f_trace = goes_on
        sys.settrace(starts)
        self._ends = lambda: sys.settrace(None)

    def stop(self) -> None:
        """End the recording and remove the ring."""
        if self._ring is None or os.getpid() != self._pid:
            return
        if self._callbacks is not None:
            self._release()
        self._ring.close()
        self._ring = None
        _RECORDING.discard(self)

    def forget(self) -> None:
        """Stop in a forked child: the ring is the parent's."""
        if self._callbacks is not None:
            self._release()

    def pause(self, is_paused: bool) -> None:
        """Leave out what runs from now on, or record again: a compiler calls functions of the user for its own ends."""
        if self._callbacks is not None:
            self._callbacks.pause(is_paused)

    def mark(self, region: str, call: int) -> None:
        """Record that a call of a compiled region begins; its number is the same on all ranks."""
        if self._callbacks is None or self._ring is None:
            return
        number = self._numbers.get(region)
        if number is None:
            new = self._ring.number_of("", region, 0)
            if new is None:
                return
            number = self._numbers[region] = new
        self._callbacks.mark(number, call & LINE_MASK)

    @property
    def num_recorded(self) -> int:
        """Steps so far, kept or not."""
        return self._ring.num_recorded if self._ring is not None else 0

    def flow(self) -> Flow | None:
        """What was recorded; None when nothing was."""
        return self._ring.flow() if self._ring is not None else None

    def _release(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        self._ends()
        callbacks.detach()

    def _first_start(self, code: CodeType) -> Any:
        """Called when code starts for the first time: follow it (None), or disable its events."""
        ring, callbacks = self._ring, self._callbacks
        unfollowed = _MONITORING.DISABLE if IS_POSSIBLE else _UNFOLLOWED
        if callbacks is None or ring is None or not self._is_followed(code.co_filename):
            return unfollowed
        # It differs where ranks compile differently, which is no branch of theirs.
        if watching.is_made_by_dynamo(code):
            return unfollowed
        try:
            names = assigned(code)
        except Exception as error:  # the user's function runs on, whatever is odd about its code
            logger.debug("the values of {} are not recorded: {}", code.co_qualname, error)
            names = NOTHING
        number = ring.number_of(code.co_filename, code.co_qualname, code.co_firstlineno, names.names)
        if number is None:
            return unfollowed
        callbacks.add(code, number, *names[1:])
        if IS_POSSIBLE:
            events = _MONITORING.events
            _MONITORING.set_local_events(_TOOL, code, events.PY_START | events.LINE | events.PY_RETURN)
            self._followed.append(code)
        return None

    def _is_followed(self, file: str) -> bool:
        if any(f"/{package}/" in file for package in self._follow):
            return True
        is_own = file.startswith(_PACKAGE) and not file.startswith(_FAULTS)
        return not (file.startswith("<") or is_own or is_library_file(file) or is_packaged(file))

    def _follows_thread(self, ident: int) -> bool:
        """True for the main thread, and for those of the autograd engine, which Python did not start."""
        if ident == self._main_thread:
            return True
        started = {thread.ident: thread for thread in threading.enumerate()}.get(ident)
        return started is None or isinstance(started, threading._DummyThread)


_RECORDING: weakref.WeakSet[FlowRecorder] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A worker of a data loader is no rank: what it executes is not what its parent does."""
    for recorder in list(_RECORDING):
        recorder.forget()
    _RECORDING.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _why_unavailable(*, by_settrace: bool) -> str:
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if IS_POSSIBLE:
        tool = _MONITORING.get_tool(_TOOL)
        return f"{tool} uses tool {_TOOL} of sys.monitoring" if tool else ""
    if not by_settrace:
        return f"{version} has no sys.monitoring (3.12 has)"
    return "a debugger or coverage uses sys.settrace" if sys.gettrace() is not None else ""


def _is_suspended(frame: FrameType) -> bool:
    """True for the frame of a generator or coroutine at a `yield`: sys.settrace calls that a return, and a call."""
    at, code = frame.f_lasti, frame.f_code.co_code
    is_resumed = at >= 0 and code[at] == _RESUME and code[at + 1] & 3
    return at >= 0 and (code[at] == _YIELD or bool(is_resumed))
