"""Stand-ins for torch, triton and what of tpcompile imports them: modules of empty classes.

Enough to import a command and to print its `--help`; nothing that is called here computes anything.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton")
_OURS = "tpcompile"
_IMPORTS = re.compile(r"^(?:import|from) (?:torch|triton)\b", re.MULTILINE)


class _Kind(type):
    """Type of the empty classes: their attributes are empty classes, too."""

    def __getattr__(cls, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return _Kind(name, (Empty,), {})

    def __or__(cls, _other: object) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, _argument: object) -> Any:
        return cls


class Empty(metaclass=_Kind):
    """What every name of these modules is: a class to derive from, a decorator, a type in an annotation."""

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **_named: Any) -> Any:
        return arguments[0] if arguments else self  # as a decorator


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        made = _Kind(name, (Empty,), {})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, executed: Collection[str]) -> None:
        self._executed = executed

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top in PACKAGES:
            return ModuleSpec(fullname, self, is_package=True)
        if top != _OURS or fullname in self._executed:
            return None
        found = PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None or not _IMPORTS.search(Path(found.origin).read_text()):
            return None
        empty = ModuleSpec(fullname, self, is_package=found.submodule_search_locations is not None)
        empty.submodule_search_locations = found.submodule_search_locations
        return empty

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def install(executed: Collection[str]) -> None:
    """Put the stand-ins before all other modules; of ours, those named in `executed` are as they are."""
    sys.meta_path.insert(0, _Finder(executed))
