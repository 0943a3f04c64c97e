"""What a rank executed before a place -> the names that the place depends on, and the values that made it differ.

Names are variables or attributes without their objects; calls lead from what a function returns to the lines that made
it, and from its arguments to the line of its caller.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tpcompile.evidence.timeline.flow import Kind
from tpcompile.evidence.timeline.source import touches
from tpcompile.evidence.timeline.values import Compared, Unlike
from tpcompile.evidence.timeline.walk import Fork, Step, depth_in, is_line, kind_of, line_step, place_of

Names = Callable[[Step], frozenset[str]]


@dataclass(frozen=True)
class Frames:
    """The functions that are running, as the steps of one rank show them."""

    callers: Mapping[int, int]
    """Index of the start or the return of a function -> that of the line that called it.

    Of the lines of a generator that goes on, too: what one of them yields is given to that line.
    """
    lines: Sequence[int]
    """Indices of the lines that are being executed at the end, outermost first."""

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Frames:
        """A frame that an exception has left is gone when a frame below it comes to its next line."""
        callers: dict[int, int] = {}
        running: list[_Frame] = []
        for index, step in enumerate(steps):
            kind, (code, _) = kind_of(step), place_of(step)
            if kind is Kind.START:
                if running:
                    callers[index] = running[-1].at
                running.append(_Frame(code, index, None))
                continue
            depth = depth_in(running, code)
            if kind is Kind.MARK or (depth is None and kind is Kind.RETURN):
                continue
            resumed_by = running[-1].at if depth is None and running else None
            if depth is not None:
                resumed_by = running[depth].resumed_by
                if kind is Kind.LINE:  # those above did not return: they yielded for the first time, or raised
                    callers |= {
                        frame.at: running[depth].at for frame in running[depth + 1 :] if frame.at not in callers
                    }
                del running[depth:]
            if kind is Kind.LINE:
                running.append(_Frame(code, index, resumed_by))
                if resumed_by is not None:
                    callers[index] = resumed_by
            elif running:
                callers[index] = running[-1].at
        return cls(callers, [frame.at for frame in running if is_line(steps[frame.at])])


class _Frame(NamedTuple):
    code: int
    at: int
    """Index of its line, or of its start."""
    resumed_by: int | None
    """Index of the line that took the next value, of a generator that goes on."""


@dataclass
class Dependence:
    """What the values of some names at the end of the steps depend on."""

    steps: Sequence[Step]
    read: Names
    """Names that a line reads."""
    assigned: Names
    """Names that it gives a value."""
    compared: Compared
    ignored: Collection[str]
    """Names that differ without harm."""
    forks: Sequence[Fork]
    """Branches at which the other rank went a different way, and not by habit."""
    changed: Callable[[Fork], Collection[str]]
    """Names to which only one of the ranks gave a value there."""
    has_lines: Callable[[Fork], bool]
    """True where a rank executed a line of the function there that is not the branch itself."""
    wanted: set[str] = field(default_factory=set)
    reasons: list[Unlike] = field(default_factory=list)
    """Values that differ for the first time, newest first."""
    decided: dict[int, Fork] = field(default_factory=dict)
    """Forks on whose way a line lies that is a part of it, by the index of their first step."""

    def follow(self, names: Iterable[str], begin: int, callers: Mapping[int, int]) -> None:
        """Go back through the steps to index `begin`."""
        self.wanted |= set(names).difference(self.ignored)
        returning: set[int] = set()
        calling: set[int] = set()
        yielding: set[tuple[int, int]] = set()
        starting = {fork.starts[0]: fork for fork in self.forks}
        for index in range(len(self.steps) - 1, begin - 1, -1):
            step = self.steps[index]
            kind, (code, _) = kind_of(step), place_of(step)
            line = callers.get(index)
            if kind is Kind.RETURN and line is not None and self._takes(line, calling, returning):
                returning.add(code)
                self._return_apart(index, code)
            elif kind is Kind.START:
                returning.discard(code)
                keys = [(index, name) for name in self.wanted if (index, name) in self._known]
                if any([self._is_pursued(key, given_by=line) for key in keys]) and line is not None:
                    calling.add(line)
            elif kind is Kind.LINE:
                keys = [(index, name) for name in self.assigned(step) & self.wanted]
                if line is not None and (line, code) not in yielding:  # the last line before the generator's value
                    yielding.add((line, code))
                    if self._takes(line, calling, returning, yielded_by=index):
                        returning.add(code)
                if code in returning:
                    returning.discard(code)
                    keys.append((index, ""))
                if any([self._is_pursued(key) for key in keys]) or index in calling:
                    self.wanted |= self.read(step).difference(self.ignored)
                    self.decided |= self._way_of(index)
            if index in starting and touches(self.changed(starting[index]), self.wanted):
                self.decided[index] = starting[index]
            if index in self.decided:
                self.wanted |= self.read(line_step(self.decided[index].branch)).difference(self.ignored)

    def _return_apart(self, index: int, code: int) -> None:
        """Where the ranks came to this return of a function by different lines of it, the fork decided what it is."""
        for fork in self.forks:
            if fork.ends[0] == index and fork.branch[0] == code and self.has_lines(fork):
                self.decided[fork.starts[0]] = fork

    def _way_of(self, index: int) -> dict[int, Fork]:
        """The fork after which only this rank came to the step, by its start; none where both did."""
        at = bisect_right(self.forks, index, key=lambda fork: fork.starts[0])
        return {fork.starts[0]: fork for fork in self.forks[at - 1 : at] if index < fork.ends[0]}

    def _takes(
        self, line: int, calling: Collection[int], returning: Collection[int], yielded_by: int | None = None
    ) -> bool:
        """True for a line whose value is looked for: what the functions that it called return is a part of it."""
        given = [(line, name) for name in self.assigned(self.steps[line]) & self.wanted]
        if place_of(self.steps[line])[0] in returning:  # it returns what is looked for
            given.append((line, ""))
        return line in calling or any([self._is_pursued(key, yielded_by=yielded_by) for key in given])

    @property
    def _known(self) -> Mapping[tuple[int, str], Unlike | None]:
        return self.compared.found

    def _is_pursued(self, key: tuple[int, str], *, given_by: int | None = None, yielded_by: int | None = None) -> bool:
        """False where the value is equal on both ranks, or differs by habit: what it was made of is no reason."""
        is_reason = self.compared.is_reason(key)
        unlike = self._known.get(key)
        if is_reason and unlike is not None:
            given_at, yielded_at = (None if by is None else place_of(self.steps[by]) for by in (given_by, yielded_by))
            self.reasons.append(unlike._replace(given_at=given_at, yielded_at=yielded_at))
        return is_reason is not False
