"""What a walk over the source of a launcher has reached: texts, kernels, ops, libraries, and what is refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from tpcompile.fastpath.hashing.effects import Effects, effects_of
from tpcompile.fastpath.hashing.libraries import is_library, is_library_class, is_standard, top_of
from tpcompile.fastpath.hashing.names import Found
from tpcompile.fastpath.hashing.paths import Places


class Reached:
    """What was reached so far.

    `effects` are what runs of the launcher change, as far as it is known: of that the definition counts, not the value,
    and the code that it keeps. `is_told` says that the launcher's files are declared.
    """

    def __init__(self, own: str, *, effects: Effects, is_told: bool) -> None:
        self.parts: dict[str, str] = {}
        """`module.function`, or that and a name in it -> text."""
        self.kernels: dict[str, Any] = {}
        """`module.function` -> Triton kernel, without what is around it."""
        self.ops: set[str] = set()
        self.functions: set[FunctionType] = set()
        self.libraries: set[str] = set()
        self.refused: list[str] = []
        """Why the source does not say what runs, by name."""
        self._effects = effects
        self._ran: list[tuple[str, Found]] = []
        """Name of a method, or empty -> what it names and changes."""
        self._left: list[str] = []
        """Why parts of the value that is read now do not count as they are."""
        self._own, self._is_told = own, is_told
        self._known: dict[int, str] = {}
        """Id of a function, class or container on the way -> its text."""
        self._kept: list[Any] = []
        """Objects of those ids."""
        self._later: list[tuple[str, Any]] = []
        self._places = Places()
        self._is_run = True

    @property
    def effects(self) -> Effects:
        """What runs of the launcher change, after all was read."""
        return effects_of(self._ran)

    def _library(self, name: str) -> str:
        top = top_of(name)
        if not is_standard(top):
            self.libraries.add(top)
        return f"library {name}"

    def _is_library(self, module: str) -> bool:
        return is_library(module or "", self._own)

    def _is_library_class(self, kind: type) -> bool:
        return is_library_class(kind, self._is_library)

    @functools.cached_property
    def _own_modules(self) -> list[str]:
        files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
        return sorted(name for name, file in files.items() if file and not self._is_library(name))

    def _remember(self, value: Any, text: str) -> None:
        self._known[id(value)] = text
        self._kept.append(value)

    def _free(self, key: str) -> str:
        """`key`, marked where two functions have one name."""
        return key if key not in self.parts else self._free(f"{key}'")

    @contextmanager
    def _inside(self, value: Any, name: str) -> Iterator[None]:
        """Read a value that may contain itself."""
        self._remember(value, f"the {name} around it")
        try:
            yield
        finally:
            del self._known[id(value)]
