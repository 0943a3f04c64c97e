"""Code that a launcher runs -> what it changes there: of that the definition counts, not the value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType

from tpcompile.fastpath.hashing.classes import is_called
from tpcompile.fastpath.hashing.names import Found


@dataclass(frozen=True)
class Effects:
    """What runs of a launcher change."""

    changed: frozenset[int] = frozenset()
    """Ids of objects."""
    rebound: frozenset[str] = frozenset()
    """Places of global variables and attributes."""
    used: frozenset[str] = frozenset()
    """Names of attributes that it uses."""


def effects_of(found: Iterable[tuple[str, Found]]) -> Effects:
    """Of all functions, by the name of the method, empty for a function that is none.

    Methods that no code uses by name are run while modules are imported, if ever: they register functions, or set
    options.
    """
    changed: set[int] = set()
    rebound: set[str] = set()
    used: set[str] = set()
    waiting = list(found)
    is_new = True
    while is_new:
        running = [each for each in waiting if not each[0] or is_called(each[0], used)]
        for each in running:
            waiting.remove(each)
            changed |= each[1].changed
            rebound |= each[1].rebound
            used |= each[1].attributes
        is_new = bool(running)
    return Effects(frozenset(changed), frozenset(rebound), frozenset(used))


def method_of(function: FunctionType) -> str:
    """Name of a method; empty for another function, and for one that was made by a function."""
    outer = function.__qualname__.rpartition("<locals>.")[2]
    return outer.rpartition(".")[2] if "." in outer else ""
