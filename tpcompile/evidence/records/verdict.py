"""The conclusion of a run: named checks, and everything found."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from tpcompile.errors import ExitCode
from tpcompile.evidence.records.base import SCHEMA_VERSION, Frozen, Layer, Status, UserLine, Worded
from tpcompile.evidence.records.bounds import Number, Rank
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.findings import Divergence, Parted, RecompileCause, Taint


class CheckId(Worded):
    """Identity of a check, and the name that the reader sees; empty for `OTHER` and `LAYER`."""

    OTHER = "other"
    CAN_START = "can start", "start of the run"
    COMPILED = "compiled", "something was compiled"
    EVERY_RANK_COMPILED = "every rank compiled", "every rank compiled"
    TIMED_OUT = "timed out", "finished in time"
    ALIVE = "alive", "ranks alive"
    AGREED = "agreed", "same collectives before they run"
    NO_ERROR = "no error", "exceptions"
    MACHINE = "machine", "room for the compiler's files"
    """The machine lacks what the program needs, such as room on a disk."""
    ARRIVED = "arrived", "every rank arrived"
    REPORTED = "reported", "every rank reported"
    UNBROKEN = "unbroken", "graph breaks"
    UNBROKEN_RESIZED = "unbroken after the change", "graph breaks after the change"
    FEW_BREAKS = "few breaks", "graph breaks"
    """A captured program has the breaks that it was said to have."""
    GRAPHS = "graphs", "one graph"
    STEADY = "steady", "recompiles in steady calls"
    RESIZED = "resized", "one recompile at most when the length changes"
    BREAKS_EVERYWHERE = "breaks everywhere", "every collective call site breaks the graph"
    """Mode A of the gate: every call site of a collective breaks the graph."""
    MANY_REGIONS = "many regions", "regions entered per forward exceed collectives"
    GRADIENT_FACTOR = "gradient factor", "compiled gradient is multiplied by tp"
    SCHEDULE = "schedule", "collectives as declared by the block"
    REPLAYS = "replays", "calls are replays"
    ONE_REGION = "one region", "one region per call"
    ENTERED = "entered regions", "compiled regions entered, equal on all ranks"
    TOGETHER = "together", "every rank compiles together"
    SAME_BRANCHES = "same branches", "ranks take the same branches"
    MOVING = "moving", "ranks make progress"
    EQUAL_VALUES = "equal values", "values that must be equal"
    """Values that the program says are equal on all ranks."""
    UNTAINTED = "untainted", "rank-dependent guards and constants"
    HIDDEN = "hidden", "text that differs by nature"
    TP_AWARE = "tp-aware", "custom ops, kernels, passes and backends"
    FORWARD = "forward", "forward right"
    GRADIENTS = "gradients", "gradients right"
    EAGER = "eager", "eager equals compiled"
    COMPILER = "compiler", "compiler right"
    """Compiled code is wrong while eager is right."""
    REPLAYED = "replayed", "replays equal compiled calls"
    """What a replay computes is what the compiled call computes."""
    CLOBBERED = "clobbered", "no in-place all-reduce clobbers a live buffer"
    FUSION = "fusion", "kernels against the baseline"
    """Kernels are compared with a baseline."""
    LOGS_COMPLETE = "logs complete", "complete logs"
    """`diagnose`: every rank left a log, and it can be read to its end."""
    GROUPS = "groups", "process groups made in the same order"
    """All ranks make the same process groups, in the same order."""
    LAYER = "layer"
    """A layer is equal on all ranks."""


class Check(Frozen):
    """One named line of a verdict."""

    id: CheckId = CheckId.OTHER
    layer: Layer | None = None
    """The layer that a `LAYER` check is about."""
    name: str = ""
    """What the reader sees; by default the text of the id."""
    mode: str = ""
    """Mode of the gate; empty for all, and where there is no gate."""
    status: Status
    expected: str
    observed: str
    details: tuple[str, ...] = ()
    line: UserLine | None = None
    """The user's line to blame, when one is known."""
    ranks: tuple[Rank, ...] = ()
    """Ranks to blame; empty for all or none."""
    is_rank_known: bool = True
    """False where these ranks differ and the evidence does not say which of them are at fault."""
    is_by_past: bool = False
    """These ranks are blamed as they did otherwise than before, or ended first: no majority says so."""
    left_out: UserLine | None = None
    """The innermost line of what these ranks left out, where that is known."""
    at_call: Number = 0
    """Of a line that the ranks call in step, the call at which it was seen; 0 where that is not known."""
    cause: Cause = Cause.UNKNOWN
    """Why it failed, where that is known."""
    advice: str = ""
    """What to do first, where that is not what the cause says."""
    is_consequence: bool = False
    """True when a different finding explains it."""
    is_undecided: bool = False
    """True when it was asked for and could not be decided, so that a run that is not red is incomplete."""
    is_of_library: bool = False
    """True when only code of torch or of an installed package is at fault, such as a graph break there."""

    @model_validator(mode="before")
    @classmethod
    def _with_name(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {**values, "name": values.get("name") or CheckId(values.get("id", CheckId.OTHER)).text}

    @property
    def is_red(self) -> bool:
        """True when the run must fail on it."""
        return self.status == Status.FAIL


class Lead(Frozen):
    """The first lines of a red verdict: cause, ranks, line, what to do."""

    cause: Cause = Cause.UNKNOWN
    says: str
    """The difference, or what was observed."""
    ranks: tuple[Rank, ...] = ()
    is_rank_known: bool = True
    """False where the ranks differ and the evidence does not say which of them are at fault."""
    is_by_past: bool = False
    """The ranks are blamed as they did otherwise than before, or ended first: no majority says so."""
    at_call: Number = 0
    """Of a line that the ranks call in step, the call at which it was seen; 0 where that is not known."""
    place: str = ""
    """Where the ranks are in the mesh, `all with pp = 1`; empty where that says no more than their numbers."""
    line: UserLine | None = None
    """The line to blame: of what the executed lines explain, the one at which the ranks parted."""
    seen_at: UserLine | None = None
    """Where the difference is seen, if the ranks parted in a different line; None where these are the same."""
    left_out: UserLine | None = None
    """The innermost line of what these ranks left out, where that is known."""
    do_first: str = ""
    consequence: str = ""
    """What became of it, where the ranks parted at a branch."""
    parted: Parted | None = None
    """The branch at which the ranks parted before that, where their executed lines are known."""
    hosts: dict[str, tuple[Rank, ...]] = {}
    """Host -> ranks of the job; empty where they are all on one."""


class Verdict(Frozen):
    """The conclusion of a run."""

    schema_version: int = SCHEMA_VERSION
    status: Status
    exit_code: ExitCode
    world_size: Number
    preset: str = ""
    modes: tuple[str, ...] = ()
    summary: str
    """One line for the reader: what was shown, or what is wrong and where."""
    lead: Lead | None = None
    """The finding that explains the others; None for a green verdict."""
    checks: tuple[Check, ...] = ()
    divergences: tuple[Divergence, ...] = ()
    timings_ms: dict[str, float] = {}
    """Median ms per forward (or forward and backward) call, by mode."""
    taints: tuple[Taint, ...] = ()
    """Everything rank-dependent that was seen, allowed or not."""
    recompiles: tuple[RecompileCause, ...] = ()
    domains: dict[str, tuple[tuple[Rank, ...], ...]] = {}
    """Domain -> groups of ranks that no red difference separates."""
    hosts: dict[str, tuple[Rank, ...]] = {}
    """Host -> its ranks, as far as they are known; empty where they are all on one."""
