"""A griffe extension: paragraphs of a docstring that explain arguments (`name: text`) -> a section of arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Any

import griffe

_ENTRY = re.compile(r"^(\w+(?:, \w+)*): ")
_VALUE = re.compile(r"^(\w+)=(\S+): ", re.MULTILINE)
"""`dst="I": text` explains one value of an argument."""


def with_section(text: str, parameters: Set[str]) -> str:
    """The docstring, with what explains parameters under the heading that mkdocstrings looks for, at its end."""
    paragraphs = _VALUE.sub(r"\1: with \2, ", text).split("\n\n")
    explaining = [paragraph for paragraph in paragraphs if _explains(paragraph, parameters)]
    if not explaining:
        return text
    others = [paragraph for paragraph in paragraphs if paragraph not in explaining]
    others += [raised for paragraph in explaining if (raised := _raised(paragraph))]
    entries = [f"    {line}" for paragraph in explaining for line in _entries(paragraph, parameters)]
    return "\n\n".join([*others, "Args:\n" + "\n".join(entries)])


def _explains(paragraph: str, parameters: Set[str]) -> bool:
    return bool(_names(paragraph, parameters))


def _raised(paragraph: str) -> str:
    """What it raises, where that ends the paragraph."""
    found = re.search(r"^Raises .*", paragraph, re.MULTILINE | re.DOTALL)
    return found[0] if found else ""


def _names(line: str, parameters: Set[str]) -> list[str]:
    """The parameters that a line begins to explain."""
    entry = _ENTRY.match(line)
    names = entry[1].split(", ") if entry else []
    return names if set(names) <= parameters else []


def _entries(paragraph: str, parameters: Set[str]) -> Iterator[str]:
    """Its lines, the later ones of an entry indented; an entry for two arguments becomes one for each."""
    entries: list[list[str]] = []
    for line in paragraph.removesuffix(_raised(paragraph)).splitlines():
        if _names(line, parameters):
            entries.append([line])
        else:
            entries[-1].append(f"    {line.strip()}")
    for first, *others in entries:
        for name in _names(first, parameters):
            yield f"{name}: {first.partition(': ')[2]}"
            yield from others


class Arguments(griffe.Extension):
    """Docstrings as this package writes them."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        _change(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        init = cls.members.get("__init__")
        if isinstance(init, griffe.Function):
            _change(cls, {parameter.name for parameter in init.parameters})


def _change(found: griffe.Object, parameters: Set[str]) -> None:
    if found.docstring is not None:
        found.docstring.value = with_section(found.docstring.value, parameters)
