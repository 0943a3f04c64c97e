"""The steps of two ranks -> the places where they part, in order, and whether they come together again.

Nothing is known of the program: the steps are walked side by side, and where they differ the nearest place is looked
for from which both go the same way.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from tpcompile.evidence.timeline.detours import detours
from tpcompile.evidence.timeline.flow import (
    EXACT,
    GLOBAL,
    LENGTH,
    LINE_BITS,
    LINE_MASK,
    NEAR,
    OWN,
    RETURNED,
    VALUE_BITS,
    WATCHED,
    Code,
    Flow,
    Kind,
)

_MAX_FORKS = 4000
_MAX_S = 2.0
"""Limit for walking two ranks: those that wait for the verdict wait for this."""
_SAME = 3, 1
"""Equal steps of a frame in a row by which two ranks are together again in it; the same where one of them ends."""
_WINDOWS = 64, 512, 4096
"""Steps after a fork in which the ranks are looked for together again, before all are looked at."""
_LEAST_MESH = 4
"""Ranks of the smallest mesh in which a coordinate is not the number of the rank."""
Step = int
"""Code << 32 | kind << LINE_BITS | line; codes are numbered alike for all ranks, so equal steps are equal numbers."""
Place = tuple[int, int]
"""(code, line)."""
_KIND_MASK = 7
_KINDS = tuple(Kind)


def kind_of(step: Step) -> Kind:
    """What the step is."""
    return _KINDS[step >> LINE_BITS & _KIND_MASK]


def place_of(step: Step) -> Place:
    """Where it is."""
    return step >> 32, step & LINE_MASK


def line_step(place: Place) -> Step:
    """The step of executing the line there."""
    return place[0] << 32 | Kind.LINE << LINE_BITS | place[1]


def is_line(step: Step) -> bool:
    """True for a line that was executed."""
    return not step >> LINE_BITS & _KIND_MASK


class Value(NamedTuple):
    """What a line gave a variable, a call its argument, or a function its caller."""

    set_at: int
    """Index of the step that set it."""
    known_at: int
    """How many steps there were when it was known: those of the functions that the line called came before."""
    place: Place
    name: str
    """`size` or `self.scale`; empty for what is returned."""
    known: int
    """The value, see `flow.EXACT`."""
    near: int | None = None
    """A float, see `flow.near_bits`."""
    own: int | None = None
    """The bits of its hash without the numbers of the rank; None where it has none of them."""
    length: int | None = None
    """Of a list or tuple."""


@dataclass(frozen=True)
class Walks:
    """The steps of all ranks, and the codes that their numbers mean."""

    codes: Sequence[Code]
    steps: Mapping[int, Sequence[Step]]
    issuing: Collection[Code]
    """Lines and regions that issue collectives, on any rank."""
    values: Mapping[int, Sequence[Value]] = field(default_factory=dict)

    @classmethod
    def of(cls, flows: Mapping[int, Flow]) -> Walks:
        """The steps without those of functions of which a rank could not record all, in the setup or behind it.

        Raises ValueError for a flow that cannot be read.
        """
        numbers: dict[Code, int] = {}
        own = {rank: [numbers.setdefault(code, len(numbers)) for code in flow.codes] for rank, flow in flows.items()}
        read = {rank: [(own[rank][number], packed) for number, packed in flow.steps()] for rank, flow in flows.items()}
        codes = list(numbers)
        begins = {rank: _watched_from(own_steps, codes) for rank, own_steps in read.items()}
        cut_behind = {code for rank, all_steps in read.items() for code in _cut(all_steps[begins[rank] :], codes)}
        cut_before = {code for rank, all_steps in read.items() for code in _cut(all_steps[: begins[rank]], codes)}
        cut_before |= cut_behind
        steps: dict[int, list[Step]] = {}
        values: dict[int, list[Value]] = {}
        for rank, all_steps in read.items():
            kept = [step for step in all_steps[: begins[rank]] if step[0] not in cut_before]
            kept += [step for step in all_steps[begins[rank] :] if step[0] not in cut_behind]
            steps[rank], values[rank] = _apart(kept, codes)
        issuing = {code.model_copy(update={"function": ""}) if code.file else code for code in _issuing(flows)}
        return cls(codes, steps, issuing, values)

    @cached_property
    def own(self) -> Set[tuple[Place, str, int]]:
        """(line, name, hash without the rank's numbers) of what every rank set that has its own numbers in it.

        Where one rank set it without its own number, that of another one is no number of a rank: `v1` beside `v0`.
        """
        sets = []
        for values in self.values.values():
            sets.append({(value.place, value.name, value.own) for value in values if value.own is not None})
        return frozenset.intersection(*map(frozenset, sets)) if sets else frozenset()

    @cached_property
    def coordinates(self) -> Set[tuple[Place, str]]:
        """(line, name) of what every rank set to its coordinate in a mesh of all ranks, (rank // a) % b, at first."""
        first_of: dict[tuple[Place, str], dict[int, int]] = {}
        for rank, values in self.values.items():
            for value in values:
                first_of.setdefault((value.place, value.name), {}).setdefault(rank, value.known)
        num_ranks = len(self.values)
        if num_ranks < _LEAST_MESH or set(self.values) != set(range(num_ranks)):
            return frozenset()
        factors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
        meshes = {
            tuple(EXACT | rank // stride % size for rank in range(num_ranks))
            for stride in factors
            for size in factors
            if size > 1 and num_ranks % (stride * size) == 0
        }
        return {
            key
            for key, by_rank in first_of.items()
            if tuple(by_rank.get(rank, -1) for rank in range(num_ranks)) in meshes
        }

    def without_numbers(self) -> Walks:
        """The steps with calls of a region that are all alike: a rank may call a region more often, and rightly so."""
        steps = {
            rank: [step & ~LINE_MASK if kind_of(step) is Kind.MARK else step for step in own]
            for rank, own in self.steps.items()
        }
        return replace(self, steps=steps)

    def issued(self, way: Iterable[Step]) -> list[Place]:
        """The places of a way at which collectives are issued, in order."""
        return [place_of(step) for step in way if self._issues(step)]

    def _issues(self, step: Step) -> bool:
        kind, (code, line) = kind_of(step), place_of(step)
        found = self.codes[code]
        if kind is Kind.LINE:
            return Code(file=found.file, function="", line=line) in self.issuing
        return kind is Kind.MARK and found in self.issuing


def _apart(read: Iterable[tuple[int, int]], codes: Sequence[Code]) -> tuple[list[Step], list[Value]]:
    """The steps, and the values: each belongs to the last line or start of its function before it."""
    steps: list[Step] = []
    values: list[Value] = []
    last: dict[int, int] = {}
    near: int | None = None
    own: int | None = None
    length: int | None = None
    for code, packed in read:
        if packed >> LINE_BITS != Kind.VALUE:
            if packed >> LINE_BITS in (Kind.LINE, Kind.START):
                last[code] = len(steps)
            steps.append(code << 32 | packed)
        elif code in last:
            number, known = divmod(packed & LINE_MASK, 1 << VALUE_BITS)
            names = codes[code].names
            if number == NEAR:
                near = known
                continue
            if number == OWN:
                own = known
                continue
            if number == LENGTH:
                length = known
                continue
            if number < len(names) or number == RETURNED:
                name = names[number].removeprefix(GLOBAL) if number < len(names) else ""
                values.append(
                    Value(last[code], len(steps), place_of(steps[last[code]]), name, known, near, own, length)
                )
            near = own = length = None
    return steps, values


def _issuing(flows: Mapping[int, Flow]) -> Iterator[Code]:
    for flow in flows.values():
        yield from flow.issuing


@dataclass(frozen=True)
class Fork:
    """A place at which two ranks part."""

    starts: tuple[int, int]
    """Index of the first step of each rank that the other one does not make there."""
    ends: tuple[int, int]
    """Index of the step at which they are together again; the number of steps where they are not."""
    frames: tuple[Place, ...]
    """Places of both when they parted, outermost first; the line of the innermost frame decided."""
    is_final: bool
    """The ranks do not come together again."""

    @property
    def branch(self) -> Place:
        """Function and line at which they part."""
        return self.frames[-1]


def forks(
    mine: Sequence[Step],
    theirs: Sequence[Step],
    begin: tuple[int, int],
    inside: Sequence[Place] = (),
    *,
    are_over: tuple[bool, bool] = (False, False),
) -> Iterator[Fork]:
    """The places at which two ranks part, from two indices on at which they are together, `inside` these frames.

    What is missing at the end of one rank is no fork: it has not come so far yet. Of a rank that is known not to come
    there, it is the last one: the ranks part in the frame that was running.
    """
    i, j = begin
    ends_s = time.monotonic() + _MAX_S
    frames = list(inside)
    ways: dict[Place, tuple[Sequence[Step], Sequence[Step]]] = {}
    for _ in range(_MAX_FORKS):
        while i < len(mine) and j < len(theirs) and mine[i] == theirs[j]:
            follow(frames, mine[i])
            i, j = i + 1, j + 1
        if i == len(mine) or j == len(theirs) or time.monotonic() > ends_s:
            goes_on = (j < len(theirs) and are_over[0]) or (i < len(mine) and are_over[1])
            if frames and goes_on:
                yield Fork((i, j), (len(mine), len(theirs)), tuple(frames), True)
            return
        as_before = ways.get(frames[-1]) if frames else None
        ends = as_before and _after(mine, theirs, (i, j), as_before)
        ends = ends or _together_again(mine, theirs, (i, j), frames)
        if frames:
            ways[frames[-1]] = mine[i : ends[0]], theirs[j : ends[1]]
            is_final = ends[0] == len(mine) or ends[1] == len(theirs)
            yield Fork((i, j), ends, tuple(frames), is_final)
        for step in mine[i : ends[0]]:
            follow(frames, step)
        i, j = ends


def _after(
    mine: Sequence[Step], theirs: Sequence[Step], begin: tuple[int, int], ways: tuple[Sequence[Step], Sequence[Step]]
) -> tuple[int, int] | None:
    """Where two ranks are together again that go the ways which they went at the same branch before."""
    i, j = begin[0] + len(ways[0]), begin[1] + len(ways[1])
    is_inside = i < len(mine) and j < len(theirs)
    is_same = is_inside and mine[begin[0] : i] == ways[0] and theirs[begin[1] : j] == ways[1]
    return (i, j) if is_same and mine[i] == theirs[j] else None


def _together_again(
    mine: Sequence[Step], theirs: Sequence[Step], begin: tuple[int, int], frames: Sequence[Place]
) -> tuple[int, int]:
    """Indices at which two ranks that part in the innermost frame go the same way again, in this frame or outside.

    What the functions did that only one of them called has no part in that: a long call is one step of its frame.
    """
    sides = mine, theirs
    for window in (*_WINDOWS, max(map(len, sides))):
        own = [_outside_of_calls(steps, at, at + window, frames) for steps, at in zip(sides, begin, strict=True)]
        ways = [[steps[index] for index in indices] for steps, indices in zip(sides, own, strict=True)]
        is_at_once = all(ways) and ways[0][0] == ways[1][0]
        found = (0, 0) if is_at_once else detours(ways[0], ways[1], (0, 0), same=_SAME)[0][1]
        ends = [
            indices[at] if at < len(indices) else len(steps)
            for indices, at, steps in zip(own, found, sides, strict=True)
        ]
        if all(end < len(steps) for end, steps in zip(ends, sides, strict=True)):
            return ends[0], ends[1]
    return _after_returns(mine, theirs, begin, frames) or (ends[0], ends[1])


def _after_returns(
    mine: Sequence[Step], theirs: Sequence[Step], begin: tuple[int, int], frames: Sequence[Place]
) -> tuple[int, int] | None:
    """Where both have left the frame in which they parted, or one outside of it, and go on in the same line."""
    for depth in range(len(frames) - 1, 0, -1):
        mine_after = _outside_of_calls(mine, begin[0], len(mine), frames, depth)
        theirs_after = _outside_of_calls(theirs, begin[1], len(theirs), frames, depth)
        if mine_after and theirs_after and mine[mine_after[0]] == theirs[theirs_after[0]]:
            return mine_after[0], theirs_after[0]
    return None


def _outside_of_calls(
    steps: Sequence[Step], begin: int, end: int, frames: Sequence[Place], depth: int | None = None
) -> list[int]:
    """Indices of the steps of the innermost frame, or of that at this depth, and of those outside of it."""
    limit = len(frames) if depth is None else depth
    running = list(frames)
    found: list[int] = []
    for index in range(begin, min(end, len(steps))):
        num_before = len(running)
        follow(running, steps[index])
        level = num_before if kind_of(steps[index]) is Kind.RETURN else len(running)
        if level <= limit or not frames:
            found.append(index)
    return found


def follow(frames: list[Place], step: Step) -> None:
    """Bring frames up to date with the next step.

    A frame that an exception or a generator has left makes no step of its own; the next line shows that it is gone.
    """
    kind, (code, line) = kind_of(step), place_of(step)
    if kind is Kind.START:
        frames.append((code, line))
        return
    depth = depth_in(frames, code)
    if kind is Kind.MARK or (kind is Kind.RETURN and depth is None):
        return
    if depth is not None:
        del frames[depth:]
    if kind is Kind.LINE:
        frames.append((code, line))


def depth_in(frames: Sequence[tuple[Any, ...]], code: int) -> int | None:
    """Depth of the innermost frame of a function; the first element of a frame is its code."""
    return next((depth for depth in reversed(range(len(frames))) if frames[depth][0] == code), None)


def _watched_from(steps: Sequence[tuple[int, int]], codes: Sequence[Code]) -> int:
    """Index of the step at which the watch began; 0 where the steps begin with it."""
    return next((index for index, (code, _) in enumerate(steps) if codes[code] == WATCHED), 0)


def _cut(steps: Iterable[tuple[int, int]], codes: Sequence[Code]) -> Iterator[int]:
    """Functions whose steps became too many to record."""
    for code, packed in steps:
        if packed >> LINE_BITS == Kind.MARK and codes[code].file:
            yield code


def common_start(mine: Sequence[Step], theirs: Sequence[Step], *, are_whole: bool) -> tuple[int, int] | None:
    """Indices at which two ranks are together: their first steps, or else the first call of a region both know."""
    if are_whole:
        return 0, 0
    calls = {step: at for at, step in reversed(list(enumerate(theirs))) if kind_of(step) is Kind.MARK}
    for at, step in enumerate(mine):
        if step in calls:
            return at, calls[step]
    return None
