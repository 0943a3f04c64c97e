"""Module -> whether it is the program's own, which counts by its source, or a library, which counts by its version."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType

from tpcompile.evidence.text.lines import installed_in

_ALWAYS = frozenset({"torch", "triton", "numpy", "functorch", "torchgen", "tpcompile"})
"""Libraries wherever they are installed from: a source checkout of them is one too."""
STANDARD = frozenset({*sys.stdlib_module_names, "builtins", "__builtin__"})
_MADE_BY_A_CALL = 1 << 9
"""The flag of a class that does not exist from the start: Python's Py_TPFLAGS_HEAPTYPE."""
PLATFORM = frozenset({"torch", "triton", "functorch", "torchgen"})
"""What a certificate names in fields of its own."""


def top_of(module: str | None) -> str:
    """Top-level package; `__main__` for code that was executed without a module."""
    return (module or "__main__").partition(".")[0]


@dataclass(frozen=True)
class Libraries:
    """What is of a library for a launcher whose top-level package is `own`.

    Modules that are neither installed nor of the standard library belong to the program, whatever their package.
    """

    own: str

    def have(self, module: str | None) -> bool:
        """True for a module of a library."""
        top = top_of(module)
        if top in (self.own, "__main__"):
            return False
        if top in _ALWAYS | STANDARD:
            return True
        known = module if module in sys.modules else top
        return bool(installed_in(_place(known)))

    def have_class(self, kind: type) -> bool:
        """True for a class of a library: its module has it, or its methods are of one.

        What made a class may name any module as its own: `dataclasses.make_dataclass` does, and a class body can.
        """
        if not self.have(kind.__module__):
            return False
        exists_from_the_start = not kind.__flags__ & _MADE_BY_A_CALL
        with suppress(AttributeError):
            is_there = attrgetter(kind.__qualname__)(sys.modules.get(kind.__module__)) is kind
            if is_there or exists_from_the_start:
                return True
        methods = [inspect.unwrap(each) for each in vars(kind).values() if isinstance(each, FunctionType)]
        modules = set()
        for method in methods:
            if not method.__code__.co_filename.startswith("<"):
                modules.add(method.__globals__.get("__name__"))
        return exists_from_the_start or (bool(modules) and all(map(self.have, modules)))


def _place(module: str) -> str:
    """The file or folder of a module, the first folder of a namespace package; empty where it is not known."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module that was made by a call has no spec
        return ""
    if spec is None:
        return ""
    folders = list(spec.submodule_search_locations or [""])
    return f"{spec.origin or folders[0]}/"


def version_of(top: str) -> str:
    """Version of the distribution that a top-level package is from, or of the package itself; else `unknown`."""
    try:
        return metadata.version(top)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(top), "__version__", "unknown"))


def roots_of(module: ModuleType | None, file: str) -> set[str]:
    """The folder that a module's top-level package or module lies in: what depends on where it is installed."""
    top = sys.modules.get(top_of(module.__name__)) if module else None
    folders = list(getattr(top, "__path__", []))
    place = Path(folders[0]) if folders else Path(file)
    return {str(place.parent), str(place.resolve().parent)}
