"""What a layer is, what it is given to explain a difference, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from tpcompile.evidence.bygroup import ByGroup, Items, Row
from tpcompile.evidence.byrank import Groups
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import CompileRecord, Item, Layer, RankRead, RankRecord


class Directness(IntEnum):
    """How directly an explanation names what happened: of several layers that differ, the lowest is the finding."""

    ENDED = 0
    """A graph break or a failed compile: whatever comes later is missing."""
    TOOLCHAIN = 1
    """A different backend."""
    STATE = 2
    """A setting of the process that is guarded."""
    FED = 3
    """A tensor that both sides have, with other metadata."""
    ARRANGED = 4
    """Order of a container, tensors that are one object."""
    COLLECTIVE = 5
    """Collectives that do not match."""
    VALUE = 6
    """A Python value that is guarded on both sides."""
    RESULT = 7
    """A tensor in the program has other metadata: what it was made from says why."""
    PROGRAM = 8
    """A different node of the program."""
    ONE_SIDED = 9
    """Something that only one side has."""
    LOWERED = 10


class Compile(Protocol):
    """The compile in which a layer differs, as all ranks saw it; groups are those of the difference."""

    def items(self, layer: Layer) -> Items:
        """Items of a layer, of the first part."""

    def differs(self, layer: Layer) -> bool:
        """True when the hashes of that layer differ."""

    def is_symbolic(self) -> ByGroup[bool]:
        """For each group: a size is a symbol."""

    def coordinates(self) -> Groups:
        """For each group: places of its ranks in the domain."""

    def rank_reads(self) -> Sequence[RankRead]:
        """Reads of the rank in the traced code of this frame, sure ones only."""


@dataclass(frozen=True)
class Difference:
    """One layer in which groups of ranks differ."""

    layer: Layer
    groups: Groups
    items: Items
    rows: tuple[Row, ...]
    """What differs and nobody declared."""
    compile: Compile

    def rows_with(self, note: str) -> list[Row]:
        """Rows in which every group has that note."""
        return [row for row in self.rows if row.has_all(note)]

    def following(self, rows: Sequence[Row], says: str) -> Followed:
        """These rows follow the rank's coordinate, the others are left."""
        left = [row for row in self.rows if row not in rows]
        return Followed(left, rows, says if rows else "")


@dataclass(frozen=True)
class Followed:
    """What follows the rank's coordinate in a layer: healthy, and listed."""

    left: Sequence[Row]
    """What does not."""
    rows: Sequence[Row] = ()
    says: str = ""


@dataclass(frozen=True)
class Explanation:
    """Why a layer differs."""

    cause: Cause
    directness: Directness
    row: Row
    """The items to show, one per group."""
    headline: str = ""
    """The difference in one line; by default that of the row."""
    guilty: frozenset[int] = frozenset()
    """Indices of the groups that evidence names."""
    hangs: bool = False
    guard: Row = field(default_factory=Row)
    """The guard behind it, where there is one."""


def in_one_part(*, is_observed: bool) -> Sequence[str]:
    """The parts of a layer that has one only."""
    return ("",) if is_observed else ()


@dataclass(frozen=True)
class LayerSpec:
    """How the items of a layer are made, compared and explained."""

    layer: Layer
    explain: Callable[[Difference], Explanation]
    items: Callable[[CompileRecord, str], Iterable[Item]] = lambda _compile, _part: ()
    parts: Callable[[CompileRecord], Sequence[str]] = lambda _compile: ()
    """Parts of the layer that were observed; the rest is *not observed*, never different."""
    of_rank: Callable[[RankRecord], Iterable[Item]] = field(default=lambda _record: ())
    """Items that belong to the rank, not to a compile."""
    follow: Callable[[Difference], Followed] = lambda difference: Followed(difference.rows)
    """Rows that follow the rank's coordinate, told from the rest."""
    is_strict: bool = True
    """The user's program: equal on every rank of a domain, or red."""
    is_ordered: bool = True
    """Compared by position; else by what items are about."""
