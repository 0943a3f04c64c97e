"""What is known about a run, as frozen records: torch-free, JSON in, JSON out.

A `RankRecord` is everything one rank knows about itself. A `RankDigest` is the same thing hashed, small
enough to travel. `Divergence`, `Check` and `Verdict` are what is concluded from the digests of all ranks.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tpcompile.evidence.causes import Cause

SCHEMA_VERSION = 1
"""Raised when a record changes shape; readers refuse another version instead of guessing."""


class Frozen(BaseModel):
    """Immutable record; an unknown key is an error, so a typo or a newer schema never passes unseen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self, *, indent: int | None = None) -> str:
        """Sorted, stable JSON: equal records give equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=indent)


class Layer(StrEnum):
    """Layers of a digest, from cause to effect; the first that differs is the finding."""

    ENVIRONMENT = "environment"
    INPUTS = "inputs"
    GRAPH = "graph"
    GUARDS = "guards"
    COLLECTIVES = "collectives"
    LOWERED = "lowered"
    KERNELS = "kernels"


STRICT_LAYERS = (Layer.ENVIRONMENT, Layer.INPUTS, Layer.GRAPH, Layer.GUARDS, Layer.COLLECTIVES)
"""The user's program: equal on every rank of a symmetry domain, arguments included, or red."""

LOWERED_LAYERS = (Layer.LOWERED, Layer.KERNELS)
"""What the lowering made of that program for one rank: may differ in rank-parametric constants."""


class UserLine(Frozen):
    """A line of source: `file:line`, the function around it and the code on it."""

    file: str
    line: int
    function: str = ""
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


class Item(Frozen):
    """One thing in a layer: `text` is canonical and hashed, `line` and `raw` are for the reader only."""

    text: str
    line: UserLine | None = None
    raw: str = ""


class Node(Frozen):
    """One node of an FX graph. References to other nodes are `%index`, so temporary names do not count."""

    scope: str
    """Subgraph the node is in, `""` for the top level."""
    op: str
    """`placeholder`, `call`, `get_attr` or `output`."""
    target: str
    args: tuple[str, ...] = ()
    kwargs: tuple[tuple[str, str], ...] = ()
    value: str = ""
    """dtype, shape, stride and device type of the result, as Dynamo prints it, e.g. `f32[8, 16][16, 1]cpu`."""
    name: str = ""
    """The temporary's name; for the reader, not in the digest."""
    line: UserLine | None = None


class Graph(Frozen):
    """One FX graph: `dynamo`, `forward`, `inference` or `backward`."""

    kind: str
    nodes: tuple[Node, ...]


class Guard(Frozen):
    """One guard: what is checked, on which value, and the user's line that asked for it."""

    type: str
    source: str
    expression: str
    line: UserLine | None = None


class GraphBreak(Frozen):
    """Why Dynamo ended a graph early, and where; `stack` is the user's, outermost first."""

    reason: str
    line: UserLine | None = None
    stack: tuple[UserLine, ...] = ()


class Collective(Frozen):
    """One collective of a compiled graph, in issue order."""

    phase: str
    """`forward` or `backward`."""
    op: str
    reduce_op: str = ""
    dtype: str = ""
    shape: str = ""
    group: str = ""
    """Role of the process group in the mesh, e.g. `tp`, never its name."""
    waited: bool = True
    used: bool = True
    """False when nothing reads the result: an out-of-place reduce taken for an in-place one."""
    line: UserLine | None = None


class Kernel(Frozen):
    """One kernel or extern call of the generated code; `code` has paths, ids and device indices removed."""

    phase: str
    name: str
    kind: str
    code: str


class InputTensor(Frozen):
    """One tensor that enters a compiled graph, as the tracer described it."""

    source: str
    dtype: str
    shape: str
    stride: str
    device: str
    requires_grad: bool = False
    dynamic: str = ""
    """Dynamic marks (`mark_dynamic` and friends), empty for none."""


class Normalised(Frozen):
    """What was removed from the raw text of one layer because it differs by nature between healthy ranks."""

    kind: str
    """`object ids`, `device indices` or `group names`."""
    layer: Layer
    num_items: int
    """Lines of raw text that hold it."""
    sha256: str
    """Hash of the removed text: it says whether the ranks' raw text differed there."""


class TaintKind(StrEnum):
    """Why a guard, a constant or a read depends on the rank."""

    DIFFERS = "differs across ranks"
    RANK = "source is rank"
    LOCAL_RANK = "source is local rank"
    GROUP_RANK = "source is process-group rank or mesh coordinate"
    DEVICE_INDEX = "source is device index"
    HOSTNAME = "source is hostname"
    ENVIRONMENT = "source is an environment variable that differs"
    PID = "source is process id"


class RankRead(Frozen):
    """What looks rank-dependent from one rank alone: a read in traced code, or a guard on a value with such a name."""

    what: Literal["read", "guard"] = "read"
    kind: TaintKind
    text: str
    """`dist.get_rank()`, or the guard."""
    line: UserLine | None = None
    is_sure: bool = False
    """The read is on a path that every trace of its function takes."""
    receiver: str = ""
    """`self.group` of `self.group.rank()` until a guard shows what it is; empty for torch's and Python's own reads."""
    variable: str = ""
    """Name of the environment variable."""
    value: str = ""
    """What was read on this rank, where that is known."""
    where: str = ""
    """Phase and frame of the compile; filled in when it travels."""


class Recompile(Frozen):
    """One recompile of one rank: the guard of the newest cache entry that failed."""

    phase: str
    frame: str
    reason: str
    """torch's text, on one line."""
    line: UserLine | None = None
    """The line that asked for the guard, where the reason does not name it."""


class CompileRecord(Frozen):
    """Everything one compile produced on one rank."""

    compile_id: str
    """Label of torch, `frame/recompile`; for the reader, never compared."""
    phase: str = ""
    """Which call of the run caused it, e.g. `C/first`; equal calls align across ranks."""
    step: int | None = None
    """Step of the run it happened in, None when nobody counted; for the reader and for alignment, never hashed."""
    function: str = ""
    line: UserLine | None = None
    stack: tuple[UserLine, ...] = ()
    inputs: tuple[InputTensor, ...] = ()
    graphs: tuple[Graph, ...] = ()
    guards: tuple[Guard, ...] = ()
    collectives: tuple[Collective, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    recompile_reasons: tuple[str, ...] = ()
    """Guards that failed, newest compile first, as torch words them."""
    cache: tuple[str, ...] = ()
    """Cache outcomes (`fx_graph_cache_hit`, ...); information, never compared."""
    failure: str = ""
    """First line of the error when the compile failed."""
    failure_line: UserLine | None = None
    """The line at which tracing failed, where torch says so; an error of the backend has none."""
    rank_reads: tuple[RankRead, ...] | None = None
    """Reads of the rank in the functions Dynamo traced; None when nobody looked at them, as in a trace file."""
    limit_reached: bool = False
    """True when this call exceeded the recompile limit: the frame runs eager from here on, on this rank."""
    is_cut: bool = False
    """True when its log ends before the compile does: what is missing was not observed."""
    normalised: tuple[Normalised, ...] = ()

    def graph(self, kind: str) -> Graph | None:
        """The graph of that kind, or None."""
        return next((g for g in self.graphs if g.kind == kind), None)


class PhaseCounters(Frozen):
    """Dynamo's own counters over one phase of the run."""

    phase: str
    calls: int = 0
    frames: int = 0
    """Frames Dynamo started to compile, resume functions included."""
    graphs: int = 0
    """Frames that became a graph (`stats.unique_graphs`)."""
    breaks: int = 0
    """Sum of the `graph_break` counter."""
    recompiles: int = 0


class RegionCount(Frozen):
    """How many compiled regions the calls of one compiled callable entered, counted at run time."""

    phase: str
    target: UserLine
    """First line of the function or `forward` that the user compiled."""
    calls: int
    """Calls that entered a region; one that ran eager from end to end is not seen."""
    entered: int
    """Regions entered over all calls."""
    most: int
    """Regions entered in one call, at most; 1 where the whole call is one graph."""
    runs_at: UserLine | None = None
    """Where code around the regions, which runs in Python, enters one of them; None where there is no such code."""


class SkippedFrame(Frozen):
    """A code object that Dynamo leaves to Python for the life of the process, since a compile of it failed."""

    line: UserLine
    """Its first line."""
    reason: str
    broke_at: UserLine | None = None
    """The user's line at which that compile broke off."""


class RankRecord(Frozen):
    """All evidence of one rank."""

    schema_version: int = SCHEMA_VERSION
    rank: int
    world_size: int
    domain: str = "tp"
    """Symmetry domain: ranks with the same text must agree."""
    coordinate: int = 0
    """This rank's place inside the domain."""
    environment: tuple[tuple[str, str], ...] = ()
    groups: tuple[tuple[str, str], ...] = ()
    """Process-group name -> role."""
    compiles: tuple[CompileRecord, ...] = ()
    counters: tuple[PhaseCounters, ...] = ()
    regions: tuple[RegionCount, ...] = ()
    """Regions entered per call, where they were counted."""
    skipped: tuple[SkippedFrame, ...] = ()
    """Frames that failed to compile at any time in this process, also before the capture began."""
    places: dict[str, int] = {}
    """Numbers that tell this rank from others besides its rank and coordinate: `local rank`, `device index`."""
    is_cut: bool = False
    """True when the log of this rank ends inside a record or a compile."""
    undeclared_ops: tuple[Item, ...] = ()
    """Custom ops and user Triton kernels found in graphs that no list declares TP-aware."""
    facts: dict[str, Any] = {}
    """Measured values a check needs (errors, timings), plain JSON."""


class LayerDigest(Frozen):
    """Hash of one layer of one compile."""

    layer: Layer
    part: str = ""
    """`forward` or `backward` where a layer comes in two pieces that need not both be observed."""
    sha256: str
    num_items: int


class CompileDigest(Frozen):
    """Hashes of one compile, with what is needed to align and name it."""

    index: int
    """Position in this rank's record, to ask for details."""
    compile_id: str
    phase: str
    frame: str
    """`function file:line`, path-independent."""
    step: int | None = None
    line: UserLine | None = None
    """First line of the compiled frame."""
    recompile_reason: str = ""
    """The guard of the newest earlier compile that failed; `""` for a first compile."""
    limit_reached: bool = False
    is_dynamic: bool = False
    """True when a size in the Dynamo graph is a symbol."""
    cache: tuple[str, ...] = ()
    """Distinct cache outcomes; information."""
    normalised: tuple[Normalised, ...] = ()
    layers: tuple[LayerDigest, ...]

    def sha(self, layer: Layer, part: str = "") -> str | None:
        """Hash of that layer, None when it was not observed."""
        return next((d.sha256 for d in self.layers if (d.layer, d.part) == (layer, part)), None)

    def num_items(self, layer: Layer) -> int:
        """Items of that layer, both parts of it; 0 when it was not observed."""
        return sum(d.num_items for d in self.layers if d.layer == layer)


class SplitCall(Frozen):
    """A compiled callable whose calls enter more than one compiled region."""

    phase: str
    runs_at: UserLine
    """Where the code around the regions, which runs in Python, enters one of them."""
    name: str = ""
    """Of that code, `Stack.forward` where it is known to be what the user compiled."""
    regions_per_call: int = 0
    """At most; 0 when they were not counted, as in a trace file."""
    pieces: tuple[UserLine, ...] = ()
    """First lines of the frames that were compiled on their own inside of it, where their compiles were seen."""
    skipped: SkippedFrame | None = None
    """Why it runs in Python, where torch still knows."""


class RankDigest(Frozen):
    """What travels between ranks: a few kilobytes, hashes and counters only."""

    schema_version: int = SCHEMA_VERSION
    rank: int
    domain: str
    coordinate: int
    environment: str
    compiles: tuple[CompileDigest, ...] = ()
    counters: tuple[PhaseCounters, ...] = ()
    is_cut: bool = False
    """True when this rank's log ends inside a compile: compiles it lacks were not observed."""
    splits: tuple[SplitCall, ...] = ()
    """Compiled callables that do not run as one region."""
    regions_counted: int = 0
    """Calls of compiled callables over which regions were counted; 0 when nobody counted."""
    breaks: tuple[tuple[str, GraphBreak], ...] = ()
    """(phase, break), so that every rank's reasons and lines reach the verdict."""
    recompile_reasons: tuple[tuple[str, str], ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    places: dict[str, int] = {}
    suspects: tuple[RankRead, ...] = ()
    """Rank reads and guards with a rank's name, each once."""
    is_code_seen: bool = False
    """True when somebody looked for rank reads in the traced code."""
    undeclared_ops: tuple[Item, ...] = ()
    overwritten: tuple[Item, ...] = ()
    """All-reduces that Inductor issues in place although it reads their operand's parts afterwards."""
    facts: dict[str, Any] = {}


class DivergenceClass(StrEnum):
    """How bad a difference is."""

    LABEL = "label only"
    """Equal content under other compile ids or in another order; information."""
    RANK_PARAMETRIC = "rank-parametric"
    """A lowered constant that follows the rank's coordinate under equal graphs; listed and green."""
    DECLARED = "declared"
    """Differs, and the config's allow-list says why that is intended; listed and green."""
    CONTENT = "content differs"
    """Collectives are equal, the program is not: wrong numbers, or a recompile some day."""
    COLLECTIVES = "collectives differ"
    """Ranks will wait for each other: a hang."""


class RankGroup(Frozen):
    """Ranks that hold the same content, and what that content is at the first difference."""

    ranks: tuple[int, ...]
    item: Item | None = None
    """The first differing item; None when this group has nothing there."""
    frame_line: UserLine | None = None
    """The user's line of the compiled frame, for a side whose item has none."""

    @property
    def line(self) -> UserLine | None:
        """The user's line of this side: the item's, else the frame's."""
        return self.item.line if self.item and self.item.line else self.frame_line


class Divergence(Frozen):
    """One difference between ranks of a symmetry domain."""

    layer: Layer
    cls: DivergenceClass
    domain: str
    where: str
    """Compile (phase and frame) it was found in, `""` for the whole rank."""
    groups: tuple[RankGroup, ...]
    title: str
    """One line: what differs."""
    cause: Cause = Cause.UNKNOWN
    guard: str = ""
    """The guard that failed on the odd ranks, as torch words it."""
    held: str = ""
    """The same guard on the ranks where it held, with their value where it is known."""
    step: int | None = None
    """Step of the run, None when nobody counted."""
    advice: str = ""
    """What to do about it."""
    consequences: tuple[Layer, ...] = ()
    """Later layers of the same compile that differ too."""

    @property
    def line(self) -> UserLine | None:
        """The user's line to blame: an item's before a frame's, the odd ranks' before the others'."""
        groups = self.groups[::-1]
        items = (g.item.line for g in groups if g.item)
        return next(filter(None, [*items, *(g.frame_line for g in groups)]), None)

    @property
    def is_red(self) -> bool:
        """True when the gate must fail on it."""
        return self.cls in (DivergenceClass.CONTENT, DivergenceClass.COLLECTIVES)

    @property
    def is_choice(self) -> bool:
        """True when ranks run other kernels for one program, with equal collectives: each chose by its own timings."""
        return self.cause == Cause.AUTOTUNE and self.cls == DivergenceClass.CONTENT


class Grade(StrEnum):
    """How sure a taint is."""

    CERTAIN = "certain"
    """Observed to differ, or torch's own read of the rank on a line that was traced; only this may be red."""
    LIKELY = "likely"
    """A read of the rank that a trace may have passed by, or on an object nothing identifies."""
    POSSIBLE = "possible"
    """Only the name says so."""


class Taint(Frozen):
    """A guard, graph constant or read that depends on the rank, whether or not the graphs agree today."""

    what: Literal["guard", "constant", "read"]
    kind: TaintKind
    grade: Grade
    text: str
    """One line: the guard, the node or the code."""
    groups: tuple[RankGroup, ...] = ()
    """What each group of ranks has there, where that is known."""
    where: str = ""
    """Phase and frame it was first seen in."""
    line: UserLine | None = None
    reason: str = ""
    """Why the config's allow-list says it is intended; empty for none."""
    suggestion: str = ""


class RecompileCause(Frozen):
    """One guard that made ranks compile again: how often, where, and what to do about it."""

    guard: str
    kind: str
    count: int
    """Recompiles over all ranks."""
    ranks: tuple[int, ...]
    phases: tuple[str, ...]
    frame: str
    values: str = ""
    """`8 -> 9, 9 -> 10`: what was expected and what came, the first few."""
    line: UserLine | None = None
    advice: str


class Status(StrEnum):
    """Outcome of one check."""

    PASS = "pass"
    FAIL = "fail"
    INFO = "info"
    SKIPPED = "skipped"


class Check(Frozen):
    """One named line of a verdict."""

    name: str
    mode: str
    status: Status
    expected: str
    observed: str
    details: tuple[str, ...] = ()
    line: UserLine | None = None
    """The user's line to blame, when one is known."""
    ranks: tuple[int, ...] = ()
    """Ranks to blame; empty for all or none."""
    cause: Cause = Cause.UNKNOWN
    """What made it fail, where that is known."""


class Verdict(Frozen):
    """The conclusion of a run; `exit_code` follows `tpcompile.errors.ExitCode`."""

    schema_version: int = SCHEMA_VERSION
    status: Status
    exit_code: int
    world_size: int
    preset: str = ""
    modes: tuple[str, ...] = ()
    summary: str
    """One line for a human: what was proved, or what is wrong and where."""
    checks: tuple[Check, ...] = ()
    divergences: tuple[Divergence, ...] = ()
    timings_ms: dict[str, float] = {}
    """Median ms per forward (or forward and backward) call, by mode."""
    taints: tuple[Taint, ...] = ()
    """Everything rank-dependent that was seen, allowed or not."""
    recompiles: tuple[RecompileCause, ...] = ()
    domains: dict[str, tuple[tuple[int, ...], ...]] = {}
    """Domain -> groups of equal ranks, over all layers."""
