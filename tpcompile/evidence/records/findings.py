"""What is concluded from the digests of all ranks: differences, rank-dependent values, recompiles."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

from tpcompile.evidence.iterables import first, majority
from tpcompile.evidence.records.base import Frozen, Item, Layer, UserLine, known, lines_of
from tpcompile.evidence.records.bounds import Rank
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.compile import TaintKind


class DivergenceClass(StrEnum):
    """Severity of a difference."""

    LABEL = "label only"
    """Equal content under different compile ids or in a different order; information."""
    RANK_PARAMETRIC = "rank-parametric"
    """A lowered constant that follows the rank's coordinate under equal graphs; listed and green."""
    DECLARED = "declared"
    """Differs, and the config's allow-list says why that is intended; listed and green."""
    CONTENT = "content differs"
    """Collectives are equal, the program is not: wrong numbers, or a later recompile."""
    COLLECTIVES = "collectives differ"
    """Ranks will wait for each other: a hang."""


class RankGroup(Frozen):
    """Ranks that hold the same content, and what that content is at the first difference."""

    ranks: tuple[Rank, ...]
    item: Item | None = None
    """The first differing item; None when this group has nothing there."""
    frame_line: UserLine | None = None
    """The user's line of the compiled frame, for a group whose item has no line."""

    @property
    def line(self) -> UserLine | None:
        """The user's line of this group: the item's, else the frame's."""
        return self.item.line if self.item and self.item.line else self.frame_line


def ranks_of(groups: Iterable[RankGroup]) -> tuple[int, ...]:
    """All ranks of some groups, sorted."""
    return tuple(sorted(rank for group in groups for rank in group.ranks))


def items_of(groups: Iterable[RankGroup]) -> list[tuple[tuple[int, ...], Item]]:
    """(ranks, item) of the groups that have an item."""
    return [(group.ranks, group.item) for group in groups if group.item is not None]


class Divergence(Frozen):
    """One difference between ranks of a symmetry domain."""

    layer: Layer
    cls: DivergenceClass
    domain: str
    where: str
    """Compile (phase and frame) it was found in, `""` for the whole rank."""
    frame: str = ""
    """`function file:line` of a frame that only some ranks compiled; empty for any other difference."""
    groups: tuple[RankGroup, ...]
    title: str
    """One line: the difference, `autocast cpu: off / on`."""
    cause: Cause = Cause.UNKNOWN
    guard: str = ""
    """The guard that failed on the odd ranks, as torch words it."""
    held: str = ""
    """The same guard on the ranks where it held, with their value where that is known."""
    step: int | None = None
    """Step of the run, None where steps were not counted."""
    is_rank_known: bool = False
    """True when the evidence says which ranks are at fault, not only that they differ."""
    advice: str = ""
    """What to do about it."""
    consequences: tuple[Layer, ...] = ()
    """Later layers of the same compile that differ too."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the domain, sorted."""
        return ranks_of(self.groups)

    @property
    def culprits(self) -> tuple[int, ...]:
        """Ranks at fault: those named by evidence, or outside of a majority; empty where ranks only differ."""
        return ranks_of(self.groups[1:]) if self.is_rank_known or self.has_majority else ()

    @property
    def has_majority(self) -> bool:
        """True when one group has more than half of the ranks."""
        return majority(group.ranks for group in self.groups) is not None

    @property
    def line(self) -> UserLine | None:
        """The user's line to blame: an item's before a frame's, the odd ranks' before the others'."""
        sides = self.groups[::-1]
        items = lines_of(side.item for side in sides if side.item)
        return first([*items, *known(side.frame_line for side in sides)])

    @property
    def is_red(self) -> bool:
        """True when the gate must fail on it."""
        return self.cls in (DivergenceClass.CONTENT, DivergenceClass.COLLECTIVES)

    @property
    def is_latent(self) -> bool:
        """True when all that runs is equal: only guards differ, so that a rank may recompile alone some day."""
        return self.layer == Layer.GUARDS and not self.consequences

    @property
    def is_choice(self) -> bool:
        """True when ranks run different kernels for one program, with equal collectives: autotuning chose by timing."""
        return self.cause == Cause.AUTOTUNE and self.cls == DivergenceClass.CONTENT


class Grade(StrEnum):
    """How sure a taint is."""

    CERTAIN = "certain"
    """Observed to differ, or torch's own read of the rank on a line that was traced; only this may be red."""
    LIKELY = "likely"
    """A read of the rank that a trace may not have reached, or on an object nothing identifies."""
    POSSIBLE = "possible"
    """Only the name suggests it."""


class Taint(Frozen):
    """A guard, graph constant or read that depends on the rank, whether or not the graphs agree today."""

    what: Literal["guard", "constant", "read"]
    kind: TaintKind
    grade: Grade
    text: str
    """One line: the guard, the node or the code."""
    groups: tuple[RankGroup, ...] = ()
    """What each group of ranks has there, where that is known."""
    variable: str = ""
    """Name of the environment variable that is read."""
    where: str = ""
    """Phase and frame it was first seen in."""
    line: UserLine | None = None
    reason: str = ""
    """Why the config's allow-list says it is intended; empty for none."""
    suggestion: str = ""

    @property
    def advice(self) -> str:
        """Why it is allowed, or what to do about it."""
        return f"allowed: {self.reason}" if self.reason else self.suggestion


class RecompileCause(Frozen):
    """One guard that made ranks compile again: how often, where, and what to do about it."""

    guard: str
    kind: str
    count: int
    """Recompiles over all ranks."""
    ranks: tuple[Rank, ...]
    phases: tuple[str, ...]
    frame: str
    values: str = ""
    """`8 -> 9, 9 -> 10`: what was expected and what came, the first few."""
    line: UserLine | None = None
    advice: str

    @property
    def text(self) -> str:
        """`size: tensor 'x' size mismatch at index 0 (8 -> 9)`."""
        return f"{self.kind}: {self.guard}" + (f" ({self.values})" if self.values else "")


class Went(Frozen):
    """What some ranks did after a branch."""

    ranks: tuple[Rank, ...]
    how: Literal["line", "enters", "returns", "region", "ends", "raises", "value"] = "line"
    """Executed the line, entered the function that begins there, returned to it, called a compiled region, ended, left
    it by an exception that no `except` caught there, or gave a variable a different value in that line."""
    line: UserLine | None = None
    calls: tuple[str, ...] = ()
    """Functions of the user that they entered until the ranks were together again, in order: `draft x3`."""
    value: str = ""
    """`sets slots = 8`, or `returns 8`."""
    given: str = ""
    """`slot = 1`: what the branch reads, where that tells the sides apart."""
    is_as_before: bool = False
    """Without a majority, those that went the way that all had gone there before."""


class Parted(Frozen):
    """A branch at which ranks parted, or a line that gave them different values, as what they executed shows."""

    line: UserLine
    times: int
    """How often they had executed that line before, as far as that is known."""
    sides: tuple[Went, ...]
    usual: Went | None = None
    """The way that the rank went there before, if it is compared with nobody else."""
    odd: tuple[Rank, ...] = ()
    """The ranks outside of a majority, or that left what they did before; empty where neither is known."""
    is_uneven: bool = True
    """Other collectives came of it; False where the ranks issued the same ones, and only data may differ."""
    is_habit: bool = False
    """The ranks part there all the time, as ranks with roles of their own do."""
    is_linked: bool = True
    """What differs is known to depend on it; False for the last thing that the ranks did differently."""
    is_recent: bool = False
    """That was since they met last, in a collective."""
    led_to: UserLine | None = None
    """The branch that it decided later, after which the ranks issued different collectives; of a value, the last one
    that followed from it. None for itself."""
