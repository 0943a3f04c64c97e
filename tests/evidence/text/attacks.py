"""A regular expression -> texts that its own syntax makes hard: what leads to a repeat, then the repeat without end.

The texts hold every repeat many times, once behind its beginning and once with it. A pattern that reads a text again
from each place where it could begin, or that divides it between two repeats, needs time quadratic in its length.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from re import _constants as kinds  # type: ignore[attr-defined]  # the only parser of their syntax
from re import _parser  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any

_OF_CLASS = {
    "CATEGORY_DIGIT": "1", "CATEGORY_WORD": "a", "CATEGORY_SPACE": " ", "CATEGORY_NOT_SPACE": "a",
    "CATEGORY_NOT_DIGIT": "a", "CATEGORY_NOT_WORD": ".",
}  # fmt: skip
_REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
_ANY = ("a", "1", "_", " ", "'", "(", "\\'", ", ")
"""What a repeat of any characters is tried with, as far as it takes them."""
_END = "\x00"
"""No pattern takes it, so that every choice before it is tried."""


def patterns(*packages: str) -> dict[str, re.Pattern[Any]]:
    """Every compiled pattern that a module of the packages holds, by `module.NAME`."""
    found: dict[str, re.Pattern[Any]] = {}
    for module in _modules(packages):
        for name, value in vars(module).items():
            for number, pattern in enumerate(_within(value)):
                found.setdefault(f"{module.__name__}.{name}[{number}]", pattern)
    return {name: pattern for pattern, name in {pattern: name for name, pattern in found.items()}.items()}


def _modules(packages: tuple[str, ...]) -> Iterator[ModuleType]:
    for name in packages:
        package = importlib.import_module(name)
        yield package
        for found in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
            yield importlib.import_module(found.name)


def _within(value: object, depth: int = 0) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict) and depth < 3:
        yield from _within(tuple(value.values()), depth)
    elif isinstance(value, tuple | list) and depth < 3:
        for one in value:
            yield from _within(one, depth + 1)


def texts(pattern: re.Pattern[Any], size: int) -> Iterator[Any]:
    """Texts of at least `size` characters, as str or bytes."""
    is_bytes = isinstance(pattern.pattern, bytes)
    syntax = pattern.pattern.decode("latin1") if is_bytes else pattern.pattern
    tree = list(_parser.parse(syntax, pattern.flags & ~re.UNICODE if is_bytes else pattern.flags))
    whole = _sample(tree)
    units = {("", whole[:-1])}
    for before, bodies in _repeats(tree, ""):
        units |= {(before, body) for body in bodies} | {("", before + body) for body in bodies} | {("", before)}
    for before, unit in sorted(units):
        if unit:
            text = before + unit * (size // len(unit) + 1) + _END
            yield text.encode("latin1", "replace") if is_bytes else text


def _repeats(tree: Any, before: str) -> Iterator[tuple[str, set[str]]]:
    """For each repeat: a text that leads to it, and texts that it takes."""
    for kind, argument in tree:
        if kind in _REPEATS:
            _, most, inner = argument
            if most > 10:
                yield before, _bodies(inner)
            yield from _repeats(inner, before)
        elif kind is kinds.SUBPATTERN:
            yield from _repeats(argument[3], before)
        elif kind is kinds.BRANCH:
            for branch in argument[1]:
                yield from _repeats(branch, before)
        elif kind in (kinds.ASSERT, kinds.ASSERT_NOT):
            yield from _repeats(argument[1], before)
        elif kind is kinds.ATOMIC_GROUP:
            yield from _repeats(argument, before)
        before += _one(kind, argument)


def _bodies(inner: Any) -> set[str]:
    branches = [branch for kind, argument in inner if kind is kinds.BRANCH for branch in argument[1]]
    takes = re.compile(rf"(?:{_rebuilt(inner)})") if len(inner) == 1 else None
    fitting = {text for text in _ANY if takes is not None and takes.match(text)}
    return {_sample(inner), *map(_sample, branches), *fitting}


def _rebuilt(inner: Any) -> str:
    """The syntax of a repeat of one character, or of nothing that is tried."""
    ((kind, argument),) = inner
    if kind is kinds.ANY:
        return "."
    if kind is kinds.NOT_LITERAL:
        return f"[^{re.escape(chr(argument))}]"
    if kind is kinds.IN:
        return f"[{''.join(map(_of_set, argument))}]"
    return "(?!)"


def _of_set(entry: Any) -> str:
    kind, argument = entry
    if kind is kinds.NEGATE:
        return "^"
    if kind is kinds.RANGE:
        return f"{re.escape(chr(argument[0]))}-{re.escape(chr(argument[1]))}"
    if kind is kinds.CATEGORY:
        letter = str(argument).removeprefix("CATEGORY_").removeprefix("NOT_")[0].lower()
        return "\\" + (letter.upper() if "NOT" in str(argument) else letter)
    return re.escape(chr(argument))


def _sample(tree: Any) -> str:
    """A text that the pattern takes, but for what it looks ahead to."""
    return "".join(_one(kind, argument) for kind, argument in tree)


def _one(kind: Any, argument: Any) -> str:
    if kind is kinds.LITERAL:
        return chr(argument)
    if kind in (kinds.ANY, kinds.NOT_LITERAL):
        return "a"
    if kind is kinds.IN:
        return _of_class(argument)
    if kind is kinds.BRANCH:
        return _sample(argument[1][0])
    if kind is kinds.SUBPATTERN:
        return _sample(argument[3])
    if kind is kinds.ATOMIC_GROUP:
        return _sample(argument)
    if kind in _REPEATS:
        least, _, inner = argument
        return _sample(inner) * max(least, 1)
    return ""


def _of_class(entries: Any) -> str:
    kind, argument = entries[0]
    if kind is kinds.NEGATE:
        takes = re.compile(f"[{''.join(map(_of_set, entries))}]")
        return next((char for char in "a1 (x'.#," if takes.match(char)), "a")
    if kind is kinds.RANGE:
        return chr(argument[0])
    return _OF_CLASS[str(argument)] if kind is kinds.CATEGORY else chr(argument)
