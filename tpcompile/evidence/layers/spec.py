"""The interface of a layer: its specification, the difference that it is given, the explanation that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction
from typing import Protocol

from tpcompile.evidence.groups.by_group import ByGroup, Items, Row
from tpcompile.evidence.groups.by_rank import Groups
from tpcompile.evidence.records import CompileRecord, Item, Layer, RankRead, RankRecord
from tpcompile.evidence.records.causes import Cause


class Directness(IntEnum):
    """How directly an explanation names what happened: of several layers that differ, the lowest is the finding."""

    ENDED = 0
    """A graph break, or a compile that failed while it was traced: everything after it is missing."""
    STATE = 2
    """A setting of the process that is guarded."""
    FED = 3
    """An input that both sides have, with different metadata."""
    ARRANGED = 4
    """Order of a container, tensors that are one object."""
    RAISED = 5
    """A compile that failed in the backend: collectives and guards are missing, the program is whole."""
    COLLECTIVE = 6
    """Collectives that do not match."""
    VALUE = 7
    """A Python value that is guarded on both sides."""
    RESULT = 8
    """A tensor in the program with different metadata; the reason is what it was computed from."""
    PROGRAM = 9
    """A different node of the program."""
    ONE_SIDED = 10
    """An item that only one side has."""
    LOWERED = 11


class Compile(Protocol):
    """The compile in which a layer differs, on all ranks; groups are those of the difference."""

    @property
    def phase(self) -> str:
        """`forward` or `backward`; empty for a layer of one part."""

    def items(self, layer: Layer, part: str = "") -> Items:
        """Items of a part of a layer."""

    def differs(self, layer: Layer) -> bool:
        """True when the hashes of that layer differ."""

    def is_symbolic(self) -> ByGroup[bool]:
        """True for each group of ranks in whose compile any size is symbolic."""

    def coordinates(self) -> Groups:
        """Coordinates of the ranks in the domain, for each group."""

    def rank_reads(self) -> Sequence[RankRead]:
        """Reads of the rank in the traced code of this frame, sure ones only."""


@dataclass(frozen=True)
class Difference:
    """One layer in which groups of ranks differ."""

    groups: Groups
    items: Items
    rows: tuple[Row, ...]
    """The rows that differ and are not declared."""
    compile: Compile

    def rows_with(self, note: str) -> list[Row]:
        """Rows in which every group has that note."""
        return [row for row in self.rows if row.has_all(note)]


@dataclass(frozen=True)
class Affine:
    """The integers `start + step * coordinate`."""

    start: Fraction | int
    step: Fraction | int


@dataclass(frozen=True)
class Parts:
    """Consecutive parts of one dimension, one for each rank in the order of the coordinates."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Followed:
    """The rows of a layer that follow the rank's coordinate: healthy, and listed."""

    left: Sequence[Row]
    """The rows that do not."""
    rows: Sequence[Row] = ()
    says: str = ""
    maps: tuple[Affine | Parts, ...] = ()
    """The maps of the coordinate that give the integers in which the rows differ, each once."""

    def and_then(self, other: Followed) -> Followed:
        """Both, where `other` was made from the rows that this one left."""
        says = "; ".join(filter(None, (self.says, other.says)))
        maps = tuple(dict.fromkeys([*self.maps, *other.maps]))
        return Followed(other.left, [*self.rows, *other.rows], says, maps)


@dataclass(frozen=True)
class Explanation:
    """Why a layer differs."""

    cause: Cause
    directness: Directness
    row: Row
    """The items that are shown, one per group."""
    headline: str = ""
    """The difference in one line; by default made from the row."""
    guilty: frozenset[int] = frozenset()
    """Indices of the groups that the evidence names."""
    hangs: bool = False
    guard: Row = field(default_factory=Row)
    """The guard that shows the cause, where there is one."""
    raised: str = ""
    """The error with which the compile failed on some ranks."""


def in_one_part(*, is_observed: bool) -> Sequence[str]:
    """The parts of a layer that has only one."""
    return ("",) if is_observed else ()


@dataclass(frozen=True)
class LayerSpec:
    """How the items of a layer are made, compared and explained."""

    explain: Callable[[Difference], Explanation]
    items: Callable[[CompileRecord, str], Iterable[Item]] = lambda _compile, _part: ()
    parts: Callable[[CompileRecord], Sequence[str]] = lambda _compile: ()
    """Parts of the layer that were observed; all others are *not observed*, never different."""
    of_rank: Callable[[RankRecord], Iterable[Item]] = field(default=lambda _record: ())
    """Items that belong to the rank, not to a compile."""
    follow: Callable[[Difference], Followed] = lambda difference: Followed(difference.rows)
    """Separates rows that follow the rank's coordinate from the others."""
    is_strict: bool = True
    """True for a layer of the user's program: any difference within a domain is red unless declared."""
    is_ordered: bool = True
    """True when items are compared by position, False when by what they are about."""
