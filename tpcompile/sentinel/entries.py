"""Compiled callables -> the one about to run: torch reports the start of a call, so that no lookup walks the stack."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from tpcompile.sentinel.progress import Region
from tpcompile.torch_api import watching


class Entries:
    """Entry hooks on compiled callables, which record the region whose call begins.

    The first frame that is looked up in a call is the callable's own, until Dynamo starts to skip its code. Since that
    takes a compile, `clear` removes all hooks before each compile.
    """

    def __init__(self) -> None:
        self.begun: dict[int, Region] = {}
        """Thread -> the region about to run there, until its first frame is looked up.

        The end of a call clears the entries of all threads, which is cheapest: a cleared region is found on the stack.
        """
        self._hooks: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()
        self._functions: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        """torch's compile context -> ids of the functions that it wraps."""

    def saw(self, call: watching.Entered) -> None:
        """Record the function of a call, including one that compiles."""
        self._functions.setdefault(call.context, set()).add(id(call.function))

    def add(self, call: watching.Entered, region: Region) -> None:
        """Add the entry hook, unless torch wraps several functions with this context."""
        context = call.context
        if context in self._hooks or len(self._functions[context]) > 1:
            return
        begun, ends = self.begun, self.begun.clear

        def mark_begun() -> Callable[[], None]:
            begun[get_ident()] = region
            return ends

        self._hooks[context] = mark_begun
        watching.entry_hooks(context).append(mark_begun)

    def clear(self) -> None:
        """Remove all entry hooks."""
        self.begun.clear()
        for context, mark_begun in list(self._hooks.items()):
            hooks = watching.entry_hooks(context)
            if mark_begun in hooks:  # an exception here would end the process: Dynamo calls this from C++
                hooks.remove(mark_begun)
        self._hooks.clear()
