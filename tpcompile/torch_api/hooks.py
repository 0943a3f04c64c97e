"""torch's callbacks around a compile and after a guard lookup -> the listeners registered here, and only here.

Private names, seen on torch 2.11.0 and 2.13.0: `callback_handler`, `CallbackTrigger`, its counter of pending callbacks,
and `set_guard_complete_hook`. `tests/torch_api/test_hooks.py` fails when one of them moves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch._C._dynamo.eval_frame as _eval_frame
import torch._dynamo.callback as _callback


class CompileListener:
    """Callbacks for frame compiles, lazy backward compiles and CUDA-graph recordings, kept over a compiler reset.

    `start(kind, compile_id)` and `end(kind, compile_id)`; kind is the trigger's name in lower case. torch calls both on
    the compiling thread. `end` of a frame runs before its new code does, and an exception in it reaches the caller of
    the compiled function.
    """

    def __init__(self, start: Callable[[str, str], None], end: Callable[[str, str], None]) -> None:
        self._handler = _callback.callback_handler
        self._start, self._end = start, end

    def ensure(self) -> None:
        """Register unless already registered; `torch.compiler.reset()` drops every callback."""
        if self._on_start not in self._handler.start_callbacks:
            self._handler.register_start_callback(self._on_start)
        if self._on_end not in self._handler.end_callbacks:
            self._handler.register_end_callback(self._on_end)

    def close(self) -> None:
        """Stop listening."""
        if self._on_start in self._handler.start_callbacks:
            self._handler.remove_start_callback(self._on_start)
        if self._on_end in self._handler.end_callbacks:
            self._handler.remove_end_callback(self._on_end)

    def _on_start(self, args: Any) -> None:
        self._start(args.callback_trigger.name.lower(), str(args.compile_id))

    def _on_end(self, args: Any) -> None:
        try:
            self._end(args.callback_trigger.name.lower(), str(args.compile_id))
        except BaseException:
            # Otherwise torch counts this compile as pending for good: no later callback runs, and reset() raises.
            self._handler._CompilationCallbackHandler__pending_callbacks_counter -= 1
            raise


@contextmanager
def compile_callbacks(start: Callable[[str], None], end: Callable[[str], None]) -> Iterator[None]:
    """Call `start` and `end` with the compile id around every compile of a frame.

    A lazily compiled backward is left out: a rank with a cache hit has none, so the counts of ranks would differ.
    """
    frames = _callback.CallbackTrigger.DYNAMO.name.lower()
    listener = CompileListener(
        lambda kind, compile_id: start(compile_id) if kind == frames else None,
        lambda kind, compile_id: end(compile_id) if kind == frames else None,
    )
    listener.ensure()
    try:
        yield
    finally:
        listener.close()


Lookup = Callable[[bool, FrameType | None], bool]
"""`(hit, frame) -> hit`: `frame` called the frame that was looked up; None stands for the listener's own caller."""


class _Lookups:
    """Shares Dynamo's one slot for a hook after guard lookups among several listeners.

    A hook that was installed before is still called, and one installed later is left in place. A single listener is put
    into the slot itself, since the hook runs at every call of compiled code.
    """

    def __init__(self) -> None:
        self._listeners: list[Lookup] = []
        self._installed: Any = None
        """The hook that we put into the slot."""
        self._previous: Any = None

    def add(self, listener: Lookup) -> None:
        self._listeners.append(listener)
        self._install()

    def remove(self, listener: Lookup) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
            self._install()

    def _install(self) -> None:
        found = _eval_frame.set_guard_complete_hook(None)
        is_later = self._installed is not None and found is not None and found is not self._installed
        if is_later:  # a hook that was installed after ours calls the hook that it replaced
            _eval_frame.set_guard_complete_hook(found)
            if not self._listeners:
                self._installed = self._previous = None
            return
        if self._installed is None or found is not self._installed:
            self._previous = found
        self._installed = self._wanted()
        _eval_frame.set_guard_complete_hook(self._installed or self._previous)

    def _wanted(self) -> Any:
        if not self._listeners:
            return None
        is_alone = len(self._listeners) == 1 and self._previous is None
        return self._listeners[0] if is_alone else self._all

    def _all(self, hit: bool) -> bool:
        if self._previous is not None:
            hit = self._previous(hit)
        for listener in self._listeners:
            listener(hit, sys._getframe(1))
        return hit


lookups = _Lookups()


@contextmanager
def guard_lookups(listener: Lookup) -> Iterator[None]:
    """Call `listener(hit, frame)` after every guard lookup."""
    lookups.add(listener)
    try:
        yield
    finally:
        lookups.remove(listener)
