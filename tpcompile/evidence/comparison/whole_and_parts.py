"""Compiles of a domain -> whether ranks compiled other functions in place of one: the whole of it, or its parts.

Each distinct program is examined once, whatever the number of ranks that compiled it.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from tpcompile.evidence.groups.domain import Domain, Seen
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import Layer, UserLine
from tpcompile.evidence.records.base import lines_of

_Place = tuple[str, str]
"""File and function of a line."""


class Programs:
    """The distinct programs of a domain, by where they are and what they call."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.frames: defaultdict[str, set[int]] = defaultdict(set)
        """Frame -> ranks that compiled it."""
        self.frames_of: defaultdict[int, set[str]] = defaultdict(set)
        self.programs: dict[Hashable, _Program] = {}
        self.num_ranks = len(domain.digests)
        for rank, digest in domain.digests.items():
            for compile_ in digest.compiles:
                seen = Seen(domain, rank, compile_)
                self.frames[seen.compile.frame].add(rank)
                self.frames_of[rank].add(seen.compile.frame)
                program = self.programs.setdefault(_identity(seen), _Program(seen))
                program.ranks.add(rank)
        self._others: dict[tuple[int, tuple[int, ...]], bool] = {}

    def are_others(self, ours: Seen, absent: tuple[int, ...]) -> bool:
        """True when the absent ranks compiled a function that the rank of `ours` did not."""
        key = ours.rank, absent
        if key not in self._others:
            mine = self.frames_of[ours.rank]
            theirs = frozenset(absent)
            others = self.frames.keys() - mine
            self._others[key] = any(not theirs.isdisjoint(self.frames[frame]) for frame in others)
        return self._others[key]

    def others(self, ours: Seen, absent: tuple[int, ...]) -> Iterator[Seen]:
        """The compiles of functions that the absent ranks compiled and the rank of `ours` did not."""
        mine = self.frames_of[ours.rank]
        for program in self.programs.values():
            if program.frame not in mine and not program.ranks.isdisjoint(absent):
                yield program.seen

    def are_parts(self, ours: Seen, absent: tuple[int, ...]) -> bool:
        """True when an absent rank compiled, as a function of its own, what `ours` calls or inlines; or the reverse."""
        if not self.are_others(ours, absent):
            return False
        mine = self.frames_of[ours.rank]
        theirs = frozenset(absent)
        program = self.programs[_identity(ours)]
        for other in self._near(program):
            is_other = other.frame not in mine and not theirs.isdisjoint(other.ranks)
            if is_other and (_inlines(program, other) or _inlines(other, program)):
                return True
        return False

    def _near(self, program: _Program) -> Iterable[_Program]:
        """Programs whose function this one names, or that name its function."""
        by_function, naming = self._places
        named = {*program.callers, *program.lines}
        found = [by_function.get(place, ()) for place in named]
        found.append(naming.get(_place(program.line), ()))
        return dict.fromkeys(itertools.chain.from_iterable(found))

    @functools.cached_property
    def _places(self) -> tuple[_ByPlace, _ByPlace]:
        """Programs of frames that not all ranks compiled, by their function, and by the functions that they name.

        A program names what it calls, and the functions that its ops are from.
        """
        partial = [one for one in self.programs.values() if len(self.frames[one.frame]) < self.num_ranks]
        naming: defaultdict[_Place | None, list[_Program]] = defaultdict(list)
        for program in partial:
            for place in {*program.callers, *program.lines}:
                naming[place].append(program)
        return grouped(partial, lambda program: _place(program.line)), naming


_ByPlace = Mapping[_Place | None, "list[_Program]"]


class _Program:
    """One function as some ranks compiled it."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.frame, self.line = seen.compile.frame, seen.compile.line
        self.ranks: set[int] = set()

    @functools.cached_property
    def callers(self) -> dict[_Place | None, list[UserLine]]:
        """The program's lines around it, by function."""
        return grouped(self.seen.compile.callers, _place)

    @functools.cached_property
    def lines(self) -> dict[_Place | None, list[UserLine]]:
        """Lines of its graph, by function."""
        return grouped(dict.fromkeys(lines_of(self.seen.items(Layer.GRAPH))), _place)


def _identity(seen: Seen) -> Hashable:
    compile_ = seen.compile
    return compile_.frame, compile_.line, compile_.sha(Layer.GRAPH), compile_.callers


def _place(line: UserLine | None) -> _Place | None:
    return (line.file, line.function) if line else None


def _inlines(whole: _Program, part: _Program) -> bool:
    """True when `whole` calls `part`, or has ops of part's function; the two are compiles of different frames."""
    outer, inner = whole.line, part.line
    if outer is None or inner is None:
        return False
    is_called = _any_inside(part.callers.get(_place(outer), ()), outer, besides=inner)
    return is_called or _any_inside(whole.lines.get(_place(inner), ()), inner, besides=outer)


def _any_inside(lines: Sequence[UserLine], frame: UserLine, *, besides: UserLine) -> bool:
    """True when one of the lines, all of one function's name, is in the function that begins at `frame`.

    And not in the one that begins at `besides`.
    """
    numbers = [line.line for line in lines]
    if _place(besides) == _place(frame) and frame.line < besides.line:
        return any(frame.line <= number < besides.line for number in numbers)
    return any(frame.line <= number for number in numbers)
