"""The same evidence hashed: what travels between ranks."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from tpcompile.evidence.records.base import SCHEMA_VERSION, Frozen, Item, Layer, UserLine
from tpcompile.evidence.records.bounds import Number, Rank
from tpcompile.evidence.records.compile import GraphBreak, Normalised, PhaseCounters, RankRead, Recompile, SkippedFrame


class LayerDigest(Frozen):
    """Hash of one layer of one compile."""

    layer: Layer
    part: str = ""
    """`forward` or `backward` where a layer comes in two pieces that need not both be observed."""
    sha256: str
    num_items: Number


CallPath = tuple[tuple[str, int], ...]
"""File and line of each call of the program that leads to a compiled callable, outermost first."""


class CompileDigest(Frozen):
    """Hashes of one compile, with what is needed to align and name it."""

    index: Annotated[int, Field(ge=-1, lt=1 << 63)]
    """Position in this rank's record, to ask for details."""
    compile_id: str
    phase: str
    frame: str
    """`function file:line`, path-independent."""
    step: int | None = None
    line: UserLine | None = None
    """First line of the compiled frame."""
    entered_at: UserLine | None = None
    """The user's line of the frame; of a frame of an installed package, the program's line that enters it."""
    called_at: UserLine | None = None
    """The line of the program that called a compiled module; None for a compiled function, whose caller torch omits."""
    called_from: tuple[UserLine, ...] = ()
    """The program's lines that called the compiled callable, outermost first; empty where they were not recorded."""
    callers: tuple[UserLine, ...] = ()
    """The program's lines around the compiled frame, outermost first; those of torch are left out."""
    recompile_reasons: tuple[str, ...] = ()
    """The guards that failed, one for each earlier compile, the newest first; empty for a first compile."""
    limit_reached: bool = False
    is_dynamic: bool = False
    """True when a size in the Dynamo graph is a symbol."""
    cache: tuple[str, ...] = ()
    """Distinct cache outcomes; information."""
    normalised: tuple[Normalised, ...] = ()
    layers: tuple[LayerDigest, ...]

    @cached_property
    def shas(self) -> dict[tuple[Layer, str], str]:
        """Layer and part -> hash, of those that were observed."""
        return {(digest.layer, digest.part): digest.sha256 for digest in self.layers}

    def sha(self, layer: Layer, part: str = "") -> str | None:
        """Hash of that layer, None when it was not observed."""
        return self.shas.get((layer, part))

    @property
    def call_path(self) -> CallPath:
        """The calls that led to the compiled callable; empty where they were not recorded."""
        return tuple((line.file, line.line) for line in self.called_from)

    @property
    def is_loaded(self) -> bool:
        """True when any of its artifacts came from a cache."""
        return any(event.endswith("_hit") for event in self.cache)

    def num_items(self, layer: Layer, part: str | None = None) -> int:
        """Number of items of that layer, of one part or over all of them; 0 when it was not observed."""
        return sum(d.num_items for d in self.layers if d.layer == layer and part in (None, d.part))


class SplitCall(Frozen):
    """A compiled callable whose calls enter more than one compiled region."""

    phase: str
    runs_at: UserLine
    """The line of the code around the regions, which runs in Python, that enters one of them; where that is code of
    torch, the first line of what the user compiled."""
    is_in_library: bool = False
    """Code of torch enters them: hooks of the compiled module itself run outside of its graph."""
    name: str = ""
    """Name of that code, `Stack.forward`, where it is known to be what the user compiled."""
    regions_per_call: int = 0
    """The most regions that one call entered; 0 when they were not counted, as in a trace file."""
    pieces: tuple[UserLine, ...] = ()
    """First lines of the frames that were compiled separately inside it, where their compiles were seen."""
    skipped: SkippedFrame | None = None
    """Why it runs in Python, where torch recorded that."""
    broken: GraphBreak | None = None
    """The graph break in its own code, where that is code of torch."""

    @property
    def broke_at(self) -> UserLine | None:
        """The line of the graph break since which it is skipped, or that ends its graph."""
        if self.skipped:
            return self.skipped.broke_at
        return self.broken.line if self.broken else None


class EnteredRegion(Frozen):
    """Compiled regions that the calls of one compiled callable entered in one phase."""

    phase: str
    name: str
    """`function file:line` of what the user compiled, path-independent."""
    line: UserLine
    entered: int
    hits: int = 0
    """Entered regions that had been compiled before."""
    has_collectives: bool
    """True when any of its compiles, of any phase, issues a collective."""


class RankDigest(Frozen):
    """What travels between ranks: a few kilobytes, hashes and counters only."""

    schema_version: int = SCHEMA_VERSION
    rank: Rank
    domain: str
    coordinate: int
    coordinates: dict[str, int] = {}
    environment: str
    compiles: tuple[CompileDigest, ...] = ()
    counters: tuple[PhaseCounters, ...] = ()
    is_cut: bool = False
    """True when this rank's log ends inside a compile: compiles it lacks were not observed."""
    splits: tuple[SplitCall, ...] = ()
    """Compiled callables that do not run as one region."""
    regions_counted: int = 0
    """Calls of compiled callables over which regions were counted; 0 where they were not."""
    regions: tuple[EnteredRegion, ...] = ()
    """Regions entered, by phase and compiled callable; empty where they were not counted."""
    breaks: tuple[tuple[str, GraphBreak], ...] = ()
    """(phase, break), so that every rank's reasons and lines reach the verdict."""
    recompile_reasons: tuple[tuple[str, str], ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    places: dict[str, int] = {}
    rank_reads: tuple[RankRead, ...] = ()
    """Rank reads and guards with a rank's name, each once."""
    is_code_seen: bool = False
    """True when the traced code was searched for reads of the rank."""
    refused_ops: tuple[Item, ...] = ()
    fast_paths: tuple[tuple[str, str], ...] = ()
    overwritten: tuple[Item, ...] = ()
    """In-place all-reduces that clobber a buffer which Inductor's code reads later."""
    facts: dict[str, Any] = {}
    host: str = ""

    def rank_sources(self, what: str) -> list[RankRead]:
        """Rank reads, or guards with a rank's name."""
        return [read for read in self.rank_reads if read.what == what]

    @property
    def observed(self) -> frozenset[Layer]:
        """Layers that any compile has."""
        return frozenset(digest.layer for compile_ in self.compiles for digest in compile_.layers)

    def breaks_in(self, phase: str) -> list[GraphBreak]:
        """Graph breaks of a phase."""
        return [found for where, found in self.breaks if where == phase]

    def counters_of(self, phase: str) -> PhaseCounters:
        """Dynamo's counters of a phase, zeros for one that never began."""
        by_phase = {counters.phase: counters for counters in self.counters}
        return by_phase.get(phase, PhaseCounters(phase=phase))
