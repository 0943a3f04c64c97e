"""What one rank observed: its compiles, and the record that holds them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal

from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records.base import SCHEMA_VERSION, Frozen, Item, Layer, UserLine
from tpcompile.evidence.records.bounds import Rank, WorldSize


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

    @property
    def is_launch(self) -> bool:
        """True for the launch of a user's Triton kernel."""
        return "triton_kernel_wrap" in self.target

    @property
    def arguments(self) -> list[str]:
        """Positional and keyword arguments, without the keywords."""
        return [*self.args, *(value for _, value in self.kwargs)]


class Graph(Frozen):
    """One FX graph: `dynamo`, `forward`, `inference` or `backward`."""

    kind: str
    nodes: tuple[Node, ...]

    @property
    def phase(self) -> str:
        """`forward` or `backward`."""
        return "backward" if self.kind == "backward" else "forward"

    @property
    def scopes(self) -> list[list[Node]]:
        """The nodes of each subgraph, in order."""
        return list(grouped(self.nodes, lambda node: node.scope).values())


def nodes_of(graphs: Iterable[Graph]) -> list[Node]:
    """The nodes of several graphs, in order."""
    return [node for graph in graphs for node in graph.nodes]


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
    library: str = ""
    """File and line of torch or an installed package at which it breaks, or the file of a function of theirs that is
    not traced; empty where the user's own code breaks it."""


class Collective(Frozen):
    """One collective of a compiled graph, in issue order."""

    phase: str
    """`forward` or `backward`."""
    op: str
    reduce_op: str = ""
    src: str = ""
    """Rank in the group that a broadcast sends from; empty for any other collective."""
    dtype: str = ""
    shape: str = ""
    group: str = ""
    """Role of the process group in the mesh, e.g. `tp`, never its name."""
    waited: bool = True
    used: bool = True
    """False when nothing reads the result: an out-of-place reduce mistaken for an in-place one."""
    line: UserLine | None = None


class Kernel(Frozen):
    """One kernel or extern call of the generated code; `code` has paths, ids and device indices removed."""

    phase: str
    name: str
    kind: str
    code: str


class LaunchedGraph(Frozen):
    """What the generated code of one graph launches, as tpcompile.fusion reads it."""

    phase: str
    is_known: bool
    """False where the code does not show its launches: it is from a cache that was filled without a recorder."""
    launches: tuple[Item, ...] = ()
    """Launches in order, without waits; the note `apart` says why a launch is not one with an earlier one, which the
    note `from` names."""


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
    """Hash of the removed text, which shows whether the ranks' raw text differed there."""


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
    """What one rank alone shows to depend on the rank: a read in traced code, or a guard on a value named like one."""

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
    """Step of the run, None where steps were not counted; for the reader and for alignment, never hashed."""
    function: str = ""
    line: UserLine | None = None
    stack: tuple[UserLine, ...] = ()
    called_from: tuple[UserLine, ...] = ()
    """The program's lines that called the compiled callable, outermost first; empty where they were not recorded."""
    inputs: tuple[InputTensor, ...] = ()
    graphs: tuple[Graph, ...] = ()
    guards: tuple[Guard, ...] = ()
    collectives: tuple[Collective, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    launched: tuple[LaunchedGraph, ...] = ()
    """One for each graph with generated code; empty where fusion was not recorded."""
    breaks: tuple[GraphBreak, ...] = ()
    recompile_reasons: tuple[str, ...] = ()
    """Guards that failed, newest compile first, as torch prints them."""
    cache: tuple[str, ...] = ()
    """Cache outcomes (`fx_graph_cache_hit`, ...); information, never compared."""
    failure: str = ""
    """First line of the error when the compile failed."""
    failure_line: UserLine | None = None
    """The line at which tracing failed, where torch reports it; an error of the backend has none."""
    rank_reads: tuple[RankRead, ...] | None = None
    """Reads of the rank in the functions that Dynamo traced; None where they were not examined, as in a trace file."""
    limit_reached: bool = False
    """True when this call exceeded the recompile limit: the frame runs eager from here on, on this rank."""
    is_cut: bool = False
    """True when the log ends before the compile does: what is missing was not observed."""
    normalised: tuple[Normalised, ...] = ()
    traced_from: tuple[tuple[UserLine, ...], ...] = ()
    """Stacks, outermost first, of the lines of its Dynamo graph that were traced from one place only; none in a log."""

    def callers(self, line: UserLine | None) -> tuple[UserLine, ...] | None:
        """Lines from the compiled frame to the call that this line is in; None where they are not known."""
        return self._callers.get((line.file, line.line)) if line is not None else None

    @functools.cached_property
    def _callers(self) -> dict[tuple[str, int], tuple[UserLine, ...]]:
        return {(stack[-1].file, stack[-1].line): stack[:-1] for stack in self.traced_from}

    @property
    def is_loaded(self) -> bool:
        """True when any of its artifacts came from a cache."""
        return any(event.endswith("_hit") for event in self.cache)

    @property
    def dynamo_nodes(self) -> list[Node]:
        """Nodes of what Dynamo traced: the user's program."""
        return nodes_of(self.graphs_of("dynamo"))

    @property
    def has_lowered(self) -> bool:
        """True when there is a graph that AOTAutograd made from Dynamo's."""
        return len(self.graphs_of("dynamo")) < len(self.graphs)

    def graphs_of(self, *kinds: str) -> list[Graph]:
        """The graphs of these kinds, in order."""
        return [graph for graph in self.graphs if graph.kind in kinds]


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
    """The line of code around the regions, which runs in Python, that enters one; None where there is no such code."""
    compiled: tuple[str, ...] = ()
    """Ids of the compiles that its calls made in that phase."""


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
    rank: Rank
    world_size: WorldSize
    domain: str = "tp"
    """Symmetry domain: ranks with the same text must agree."""
    coordinate: int = 0
    """This rank's place inside the domain."""
    coordinates: dict[str, int] = {}
    """This rank's place along each axis of the mesh; empty without one."""
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
    """Numbers that identify this rank, besides its rank and coordinate: `local rank`, `device index`."""
    is_cut: bool = False
    """True when the log of this rank ends inside a record or a compile."""
    refused_ops: tuple[Item, ...] = ()
    """Custom ops and user Triton kernels in graphs that may not run on a shard; the note `why` says why."""
    fast_paths: tuple[tuple[str, str], ...] = ()
    """Name of each fast path, custom op or kernel -> `used`, `refused: why` or `not applicable: why`."""
    facts: dict[str, Any] = {}
    """Measured values a check needs (errors, timings), plain JSON."""
    host: str = ""
    """Name of the host of this rank."""
    job: str = ""
    """Identity of the run, equal on all its ranks; empty where they did not agree on one."""
