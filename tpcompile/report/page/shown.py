"""What a page of a run shows, as data."""

from __future__ import annotations

from dataclasses import dataclass

from tpcompile.evidence.records import Check
from tpcompile.report.page.evidence import Event
from tpcompile.report.page.excerpt import Excerpt
from tpcompile.report.page.listing import Listing


@dataclass(frozen=True)
class Side:
    """What some ranks have or did, and the source it comes from."""

    ranks: str
    says: str
    source: Excerpt | None


@dataclass(frozen=True)
class Difference:
    """One difference between ranks, in full."""

    title: str
    facts: tuple[str, ...]
    """Layer, place, cause, guards."""
    sides: tuple[Side, ...]
    source: Excerpt | None
    """The line that all sides have in common; else each side has its own."""
    listing: Listing | None
    links: tuple[tuple[str, str], ...]
    """Text and address of pages of the compiles that differ."""
    advice: str
    more: str
    """Other places of it."""


@dataclass(frozen=True)
class Parting:
    """The finding that explains the others."""

    cause: str
    ranks: str
    guard: str
    """The guard that explains it, on both sides."""
    source: Excerpt | None
    parted_at: Excerpt | None
    """The line where the ranks parted, if that is a different one."""
    sides: tuple[Side, ...]
    led_to: str
    consequence: str
    do_first_label: str
    do_first: str


@dataclass(frozen=True)
class Lane:
    """A row of the timeline."""

    ranks: str
    is_odd: bool
    """True for ranks that the finding blames."""
    events: tuple[Event, ...]
    num_left_out: int


@dataclass(frozen=True)
class GridLayer:
    """A layer of the rank grid."""

    name: str
    codes: tuple[int, ...]
    """For each rank the number of its content, 0 for that of most ranks; -1 where it was not observed."""
    groups: tuple[str, ...]
    """The ranks of each content."""


@dataclass(frozen=True)
class Value:
    """What some ranks have of one thing."""

    ranks: str
    text: str


@dataclass(frozen=True)
class Values:
    """One thing, and what the ranks have of it; one value where they agree."""

    about: str
    values: tuple[Value, ...]
    place: str = ""

    @property
    def differs(self) -> bool:
        """True where ranks have different values."""
        return len(self.values) > 1


@dataclass(frozen=True)
class Guards:
    """Guards of one compile on all ranks that made it."""

    where: str
    rows: tuple[Values, ...]


@dataclass(frozen=True)
class LaunchRow:
    """One launch of generated code; bytes that it reads and writes."""

    name: str
    role: str
    ops: str
    num_bytes: int
    place: str


@dataclass(frozen=True)
class Fusion:
    """Launches of one graph, on ranks with equal manifests."""

    title: str
    launches: tuple[LaunchRow, ...]
    num_launches: int
    num_bytes: int
    missed: tuple[Value, ...]
    """Reason -> the nodes that it kept apart (in `ranks`, for want of a better column)."""


@dataclass(frozen=True)
class View:
    """All that a page shows."""

    outcome: str
    is_green: bool
    headline: str
    command: str
    name: str
    summary: str
    facts: tuple[tuple[str, str], ...]
    parting: Parting | None
    differences: tuple[Difference, ...]
    num_differences: int
    accepted: tuple[str, ...]
    checks: tuple[tuple[str, tuple[Check, ...]], ...]
    equal: tuple[str, ...]
    world_size: int
    grid: tuple[GridLayer, ...]
    lanes: tuple[Lane, ...]
    has_clock: bool
    guards: tuple[Guards, ...]
    num_guards_left_out: int
    fusion: tuple[Fusion, ...]
    timings: tuple[tuple[str, str], ...]
    environment: tuple[Values, ...]
    links: tuple[tuple[str, str], ...]
    """Text and address of pages of each rank."""
    notes: tuple[str, ...]
