"""A program's source with marked places, edits -> the mutated source and the lines of each tag; torch-free.

# place: KIND key=value ...       a line of its own: text can be inserted here; values are names of the program
statement  # site: KIND           a statement that can be rewritten
statement  # tag: NAME            a line that a finding may point at
statement  # fault                the same, written by an operator
"""

from __future__ import annotations

import string
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
FAULT = "fault"
_PLACE, _SITE, _TAG = "# place: ", "  # site: ", "  # tag: "


@dataclass(frozen=True)
class Insert:
    """Lines to insert at a place."""

    at: str
    text: str


@dataclass(frozen=True)
class Rewrite:
    """Text of a site to replace; the line becomes the fault's."""

    at: str
    old: str
    new: str


Edit = Insert | Rewrite


@dataclass(frozen=True)
class Spot:
    """A place or a site of a program."""

    kind: str
    index: int
    """Line, from 0."""
    indent: str = ""
    names: Mapping[str, str] = field(default_factory=dict)


class DoesNotFit(Exception):
    """The program has no such place, or the place lacks a name that the text asks for."""


@dataclass(frozen=True)
class Template:
    """A program that can be mutated."""

    name: str
    lines: tuple[str, ...]

    @classmethod
    @cache
    def read(cls, name: str) -> Template:
        """The program of that name."""
        text = (PROGRAMS / f"{name}.py").read_text()
        return cls(name=name, lines=tuple(text.splitlines()))

    def places(self, kind: str) -> list[Spot]:
        """Places of a kind, from top to bottom."""
        return [spot for spot in self._all_places() if spot.kind == kind]

    def _all_places(self) -> Iterator[Spot]:
        for index, line in enumerate(self.lines):
            text = line.lstrip()
            if text.startswith(_PLACE):
                kind, *pairs = text.removeprefix(_PLACE).split()
                indent = line[: len(line) - len(text)]
                names = dict(pair.split("=", 1) for pair in pairs)
                yield Spot(kind=kind, index=index, indent=indent, names=names)

    def site(self, kind: str) -> Spot:
        """The only site of a kind. Raises DoesNotFit where there is none."""
        for index, line in enumerate(self.lines):
            if line.endswith(_SITE + kind):
                return Spot(kind=kind, index=index)
        raise DoesNotFit(f"{self.name} has no site {kind}")


@dataclass(frozen=True)
class Source:
    """A program as it is run."""

    text: str

    def tagged(self, tags: Sequence[str]) -> tuple[int, ...]:
        """Numbers of the lines of these tags, sites and of the fault itself."""
        marked = [f"{mark}{tag}" for tag in tags for mark in (_SITE, _TAG)]
        endings = (*marked, f"# {FAULT}")
        lines = self.text.splitlines()
        return tuple(number for number, line in enumerate(lines, start=1) if line.endswith(endings))


def mutated(template: Template, edits: Sequence[tuple[Edit, Spot]], names: Mapping[str, str]) -> Source:
    """Apply edits, each at its spot. `names` are known everywhere, the names of a place within its text."""
    lines = list(template.lines)
    bottom_up = sorted(reversed(edits), key=lambda pair: -pair[1].index)
    for edit, spot in bottom_up:
        if isinstance(edit, Insert):
            text = filled(edit.text, {**names, **spot.names})
            # Below the marker: of two edits at one place, the first is done last and stands first.
            lines[spot.index + 1 : spot.index + 1] = textwrap.indent(text, spot.indent).splitlines()
        else:
            lines[spot.index] = _rewritten(lines[spot.index], edit, names)
    return Source("\n".join(lines) + "\n")


def filled(text: str, names: Mapping[str, str]) -> str:
    """Text with its `$names` replaced. Raises DoesNotFit where one is unknown."""
    try:
        return string.Template(textwrap.dedent(text).strip("\n")).substitute(names)
    except KeyError as unknown:
        raise DoesNotFit(f"no name {unknown}") from None


def _rewritten(line: str, edit: Rewrite, names: Mapping[str, str]) -> str:
    if edit.old not in line:
        raise DoesNotFit(f"{edit.old!r} is not in {line!r}")
    statement = line.partition(_SITE)[0]
    return f"{statement.replace(edit.old, filled(edit.new, names))}  # {FAULT}"
