"""Code that a launcher runs -> what it changes outside of itself: of that the definition counts, not the value."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain
from types import FunctionType

from tpcompile.fastpath.hashing.trees import CHANGES, body_of, changed_in

_MAKES = frozenset({"__init__", "__new__", "__post_init__", "__set_name__", "__setstate__"})
"""Methods that make an object: what they store is the object, not a change of one that was made before."""


@dataclass
class Effects:
    """What code changes and uses."""

    changed: set[int] = field(default_factory=set)
    """Ids of objects."""
    rebound: set[str] = field(default_factory=set)
    """Places of global variables and attributes that it assigns."""
    used: set[str] = field(default_factory=set)
    """Names of attributes that it uses: methods with other names are not called."""

    def add(self, other: Effects) -> None:
        """Add those of other code."""
        self.changed |= other.changed
        self.rebound |= other.rebound
        self.used |= other.used


def effects_of(functions: Iterable[tuple[FunctionType, Effects]]) -> Effects:
    """What functions change together.

    Methods that no code uses by name are run while modules are imported, if ever: they register functions, or set
    options.
    """
    found, num_used = Effects(), -1
    while len(found.used) > num_used:
        num_used = len(found.used)
        for function, effects in functions:
            kind, _, name = function.__qualname__.rpartition("<locals>.")[2].rpartition(".")
            if not kind or _is_called(name, found.used):
                found.add(effects)
    return found


def changing_attributes(kind: type, used: Set[str]) -> set[str]:
    """Attributes that the methods of a class itself store or change after an instance was made.

    `used` are the names of attributes that the launcher uses. Other methods fill a registry or settings while modules
    are imported, and what they keep counts as it is.
    """
    changing: set[str] = set()
    inside = chain.from_iterable(body.body for body in body_of(kind))
    for method in inside:
        if isinstance(method, ast.FunctionDef) and _is_called(method.name, used):
            own = [*method.args.posonlyargs, *method.args.args, ast.arg("")][0]
            changing.update(_changed(method, own.arg))
    return changing


def _changed(method: ast.FunctionDef, own: str) -> Iterator[str]:
    """Attributes of the argument `own` that a method changes."""
    for node in ast.walk(method):
        changed = changed_in(node, CHANGES)
        while isinstance(changed, ast.Subscript):
            changed = changed.value
        match node, changed:
            case ast.Attribute(attr=attr), ast.Name(id=name) if name == own:
                yield attr
            case ast.Subscript() | ast.Call(), ast.Attribute(value=ast.Name(id=name), attr=attr) if name == own:
                yield attr


def _is_called(name: str, used: Set[str]) -> bool:
    """True when a launcher that uses attributes of these names may call a method of an object that was made before."""
    is_pythons = name.startswith("__") and name.endswith("__")
    return name in used or (is_pythons and name not in _MAKES)
