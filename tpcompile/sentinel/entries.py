"""Compiled callables -> which of them is about to run: torch says when a call begins, so no lookup walks the stack."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from tpcompile.sentinel.progress import Region
from tpcompile.torch_api import watching


class Entries:
    """Regions whose compiled callables tell when a call of them begins.

    They tell it only while nothing compiles. The first frame that is looked up in a call is the callable's own as long
    as Dynamo does not begin to skip that code, which takes a compile; `clear` before each one.
    """

    def __init__(self) -> None:
        self.begun: dict[int, Region] = {}
        """Thread -> the region that is about to run there, until its first frame was looked up.

        The end of a call forgets those of all threads, which is cheapest: a region that was forgotten is found on the
        stack.
        """
        self._hooks: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()
        self._functions: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        """Context of torch -> ids of the functions it was seen to wrap."""

    def saw(self, call: watching.Entered) -> None:
        """A callable was called; also where it compiles."""
        self._functions.setdefault(call.context, set()).add(id(call.function))

    def add(self, call: watching.Entered, region: Region) -> None:
        """Have that callable tell of its calls; not where torch wraps several functions with one context."""
        context = call.context
        if context in self._hooks or len(self._functions[context]) > 1:
            return
        begun, ends = self.begun, self.begun.clear

        def tell() -> Callable[[], None]:
            begun[get_ident()] = region
            return ends

        self._hooks[context] = tell
        watching.entry_hooks(context).append(tell)

    def clear(self) -> None:
        """No callable tells any more."""
        self.begun.clear()
        for context, tell in list(self._hooks.items()):
            hooks = watching.entry_hooks(context)
            if tell in hooks:  # an exception here would end the process: Dynamo calls this from C++
                hooks.remove(tell)
        self._hooks.clear()
