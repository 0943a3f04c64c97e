"""The conclusion of a run: named checks, and everything found."""

from __future__ import annotations

from enum import StrEnum

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records.base import SCHEMA_VERSION, Frozen, Layer, Status, UserLine
from tpcompile.evidence.records.findings import Divergence, RecompileCause, Taint


class CheckId(StrEnum):
    """Which check it is; its name is for the reader."""

    OTHER = "other"
    COMPILED = "compiled"
    """Something was compiled."""
    TIMED_OUT = "timed out"
    ALIVE = "alive"
    COLLECTIVES_AGREED = "collectives agreed"
    NO_ERROR = "no error"
    ARRIVED = "arrived"
    REPORTED = "reported"
    UNBROKEN = "unbroken"
    TOGETHER = "together"
    MOVING = "moving"
    LAYER = "layer"
    """A layer is equal on all ranks."""


class Check(Frozen):
    """One named line of a verdict."""

    id: CheckId = CheckId.OTHER
    layer: Layer | None = None
    """The layer that it is about, of a `LAYER` check."""
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
