"""Measurements of modes A, B and C on one rank, for the checks and for a replay; torch-free.

A record carries it as JSON, so that `evidence` knows nothing of modes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator

from tpcompile.choices import AnyMode
from tpcompile.evidence.records import Frozen, RankDigest, WrongCompiled, WrongOp
from tpcompile.fusion.baseline import Outcome


class TensorError(Frozen):
    """Error of one tensor against float64, and that of the same tensor on a single device in the same dtype."""

    mode: AnyMode
    what: str
    """`forward NAME`, `grad NAME`, or `eager ...` for the distance between eager and compiled."""
    error: float
    single: float
    """The single-device error."""
    ratio: float
    is_judged: bool = True
    """False where the single-device error is more than rounding: then the ratio says nothing."""
    times: float | None = None
    """The number of times that the tensor is the right one; None where it is no multiple of it."""
    says: str = ""
    """Why there is no error, where a run does not return the tensor, or returns it in a different shape."""

    @property
    def name(self) -> str:
        """The tensor as the user named it in what a step returns; `forward`, `forward.1` where it has no name."""
        return self.what.removeprefix("eager ").removeprefix("forward ")

    @property
    def badness(self) -> float:
        """The ratio; NaN counts as infinite."""
        return math.inf if math.isnan(self.ratio) else self.ratio


class GraphBreaks(Frozen):
    """Mode A: where the block issues collectives, and where Dynamo broke the graph. Sites are `file.py:line`."""

    sites: tuple[str, ...] = ()
    collectives_per_forward: int = 0
    broken_sites: tuple[str, ...] = ()
    regions_per_forward: int = 0
    """Compiled regions entered by one call."""

    def unbroken(self, sites: Sequence[str]) -> list[str]:
        """Those of the sites at which the graph was not broken."""
        return sorted(set(sites).difference(self.broken_sites))


class GradientFactor(Frozen):
    """Mode B: the factor by which the gradient of an in-place all_reduce is wrong; 1 where it is right."""

    eager: float | None = None
    compiled: float | None = None


class Schedule(Frozen):
    """Mode C: collectives that the block declares, and those in its compiled graphs, in order."""

    declared: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    """The place at which each compiled collective is issued."""

    @property
    def first_difference(self) -> str:
        """The first collective that is not as declared; call it only when the two lists differ."""
        for number, (want, got) in enumerate(zip(self.declared, self.compiled, strict=False)):
            if want != got:
                return f"#{number} is {got}, declared {want}"
        num_declared, num_compiled = len(self.declared), len(self.compiled)
        if num_declared > num_compiled:
            return f"{num_compiled} of {num_declared}; missing #{num_compiled} {self.declared[num_compiled]}"
        return f"{num_compiled} instead of {num_declared}; extra #{num_declared} {self.compiled[num_declared]}"


class Replays(Frozen):
    """Mode C under a profile: what its calls were."""

    captures: int = 0
    """CUDA graphs."""
    replays: int = 0
    calls: int = 0


class Declared(Frozen):
    """The declarations of a target that its checks need."""

    num_graphs: int | None = 1
    has_resized: bool = False
    has_reference: bool = False


class GateFacts(Frozen):
    """All measurements of a rank; what was not measured has its default."""

    breaks: GraphBreaks = GraphBreaks()
    gradient_factor: GradientFactor = GradientFactor()
    schedule: Schedule = Schedule()
    declared: Declared = Declared()
    replays: Replays = Replays()
    errors: tuple[TensorError, ...] = ()
    inputs: tuple[str, ...] = ()
    """Fingerprints of a target's inputs before the first call; empty where there is no reference."""
    reference: tuple[float, ...] = ()
    """Norms of what a target's reference returns in float64."""
    left_out: tuple[str, ...] = ()
    """Parameters that a step changes and that are no rows of a parameter of the reference: they were not compared."""
    first_wrong: str = ""
    """The first module whose output is wrong."""
    first_wrong_op: WrongOp | None = None
    """The op, or the parameter or buffer, that this begins with; None when unknown."""
    wrong_compiled: WrongCompiled | None = None
    """Where compiled code begins to be wrong while eager is right; None where it does not, or nobody searched."""
    fusion: Outcome | None = None
    """Kernels against the baseline; None in a run without one."""
    median_ms: dict[AnyMode, float] = {}
    """Mode -> median of its steady calls, in ms."""

    def errors_in(self, mode: AnyMode, what: str = "") -> list[TensorError]:
        """Errors of one mode, of tensors whose name begins with `what`."""
        of_mode = [error for error in self.errors if error.mode == mode]
        return [error for error in of_mode if error.what.startswith(what)]

    def with_errors(self, mode: AnyMode, errors: Mapping[str, Mapping[str, Any]]) -> Self:
        """These facts with the errors of a mode, by name, as `tpcompile.numerics` returns them."""
        found = (TensorError.model_validate({"mode": mode, "what": what, **error}) for what, error in errors.items())
        return self.changed(errors=(*self.errors, *found))


def _with_facts(digest: RankDigest) -> RankDigest:
    GateFacts.model_validate(digest.facts)
    return digest


GateDigest = Annotated[RankDigest, AfterValidator(_with_facts)]
"""A digest whose facts are `GateFacts`."""
