"""The steps of two ranks -> the places where they part, in order, and whether they come together again.

Nothing is known of the program: the steps are walked side by side, and where they differ the nearest place is looked
for from which both go the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tpcompile.evidence.timeline.detours import detours
from tpcompile.evidence.timeline.flow import LINE_BITS, Code, Flow, Kind

_MAX_FORKS = 4000
Step = int
"""Code << 32 | kind << 30 | line; codes are numbered alike for all ranks, so equal steps are equal numbers."""
Place = tuple[int, int]
"""(code, line)."""
_LINE_MASK = (1 << LINE_BITS) - 1


def kind_of(step: Step) -> Kind:
    """What the step is."""
    return Kind(step >> LINE_BITS & 3)


def place_of(step: Step) -> Place:
    """Where it is."""
    return step >> 32, step & _LINE_MASK


def is_line(step: Step) -> bool:
    """True for a line that was executed."""
    return not step >> LINE_BITS & 3


@dataclass(frozen=True)
class Walks:
    """The steps of all ranks, and the codes that their numbers mean."""

    codes: Sequence[Code]
    steps: Mapping[int, Sequence[Step]]
    issuing: Collection[Code]
    """Lines and regions that issue collectives, on any rank."""

    @classmethod
    def of(cls, flows: Mapping[int, Flow]) -> Walks:
        """The steps without those of functions of which a rank could not record all.

        Raises ValueError for a flow that cannot be read.
        """
        numbers: dict[Code, int] = {}
        steps: dict[int, list[Step]] = {}
        cut: set[int] = set()
        for rank, flow in flows.items():
            own = [numbers.setdefault(code, len(numbers)) << 32 for code in flow.codes]
            functions = {number for number, code in enumerate(flow.codes) if code.file}
            steps[rank] = [own[number] | packed for number, packed in flow.steps()]
            cut |= {own[number] for number, packed in flow.steps() if number in functions and packed >> LINE_BITS == 3}
        kept = {rank: [step for step in own if step >> 32 << 32 not in cut] for rank, own in steps.items()}
        issuing = {code.model_copy(update={"function": ""}) if code.file else code for code in _issuing(flows)}
        return cls(list(numbers), kept if cut else steps, issuing)

    def without_numbers(self) -> Walks:
        """The steps with calls of a region that are all alike: a rank may call a region more often, and rightly so."""
        steps = {
            rank: [step & ~_LINE_MASK if kind_of(step) is Kind.MARK else step for step in own]
            for rank, own in self.steps.items()
        }
        return Walks(self.codes, steps, self.issuing)

    def issued(self, way: Iterable[Step]) -> list[Place]:
        """The places of a way at which collectives are issued, in order."""
        return [place_of(step) for step in way if self._issues(step)]

    def _issues(self, step: Step) -> bool:
        kind, (code, line) = kind_of(step), place_of(step)
        found = self.codes[code]
        if kind is Kind.LINE:
            return Code(file=found.file, function="", line=line) in self.issuing
        return kind is Kind.MARK and found in self.issuing


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
    """Where both were when they parted, outermost first; the line of the innermost frame decided."""
    is_final: bool
    """The ranks do not come together again."""

    @property
    def branch(self) -> Place:
        """Function and line at which they part."""
        return self.frames[-1]


def forks(mine: Sequence[Step], theirs: Sequence[Step], begin: tuple[int, int]) -> Iterator[Fork]:
    """The places at which two ranks part, from two indices on at which they are together.

    What is missing at the end of one rank is no fork: it has not come so far yet.
    """
    i, j = begin
    frames: list[Place] = []
    for _ in range(_MAX_FORKS):
        while i < len(mine) and j < len(theirs) and mine[i] == theirs[j]:
            follow(frames, mine[i])
            i, j = i + 1, j + 1
        if i == len(mine) or j == len(theirs):
            return
        for starts, ends in detours(mine, theirs, (i, j)):
            for step in mine[i : starts[0]]:
                follow(frames, step)
            if frames:
                is_final = ends[0] == len(mine) or ends[1] == len(theirs)
                yield Fork(starts, ends, tuple(frames), is_final)
            for step in mine[starts[0] : ends[0]]:
                follow(frames, step)
            i, j = ends


def follow(frames: list[Place], step: Step) -> None:
    """Bring frames up to date with the next step.

    A frame that an exception or a generator has left makes no step of its own; the next line shows that it is gone.
    """
    kind, (code, line) = kind_of(step), place_of(step)
    if kind is Kind.START:
        frames.append((code, line))
        return
    depth = next((depth for depth in reversed(range(len(frames))) if frames[depth][0] == code), None)
    if kind is Kind.MARK or (kind is Kind.RETURN and depth is None):
        return
    if depth is not None:
        del frames[depth:]
    if kind is Kind.LINE:
        frames.append((code, line))


def common_start(mine: Sequence[Step], theirs: Sequence[Step], *, are_whole: bool) -> tuple[int, int] | None:
    """Indices at which two ranks are together: their first steps, or else the first call of a region both know."""
    if are_whole:
        return 0, 0
    calls = {step: at for at, step in reversed(list(enumerate(theirs))) if kind_of(step) is Kind.MARK}
    for at, step in enumerate(mine):
        if step in calls:
            return at, calls[step]
    return None
