"""What is measured of a program in one mode, and the advice that follows."""

from __future__ import annotations

from enum import StrEnum

from tpcompile.evidence.records import WrongCompiled
from tpcompile.evidence.records.base import Frozen

EAGER = "eager"
MODES = ("default", "reduce-overhead", "max-autotune")
"""Modes of torch.compile by cost, the cheapest first."""
WITH_CUDA_GRAPHS = MODES[1:]


class Side(Frozen):
    """Eager, or compiled, in the steady state."""

    step_ms: tuple[float, ...]
    """Milliseconds of each round; rounds of both sides alternate."""
    launches: int
    """A step: kernels that the profiler saw on a GPU; on CPU, loop nests of generated code and ops without views."""
    library_share: float
    """Part of the time of all kernels that is in kernels which Inductor did not generate."""
    busy_share: float | None
    """Time of the kernels, as a part of a step; None on CPU."""
    num_replays: int | None = None
    """CUDA graphs that a step launches; None on CPU."""


class Measured(Frozen):
    """One mode, in a process of its own."""

    mode: str
    eager: Side
    compiled: Side
    error_ratio: float | None
    """Largest error against float64, as a multiple of the error of eager; None where it could not be computed."""
    wrong_compiled: WrongCompiled | None = None
    """Where compiled code begins to be wrong; None where it is right, or outputs were not compared."""
    first_call_s: float
    """Seconds of the first call with an empty cache."""
    cached_s: float | None
    """The first call of a second process, with the cache of the first; None where it was not run."""
    num_cold_calls: int
    """Calls after the first until one takes at most 1.5 times a steady step."""
    num_graphs: int
    num_regions: int
    """Compiled regions that a step enters."""
    num_breaks: int
    num_recompiles: int
    """Recompiles after the second call; all calls have equal inputs, or those that the step chooses."""
    num_rerecorded: int
    """Inputs of CUDA graphs that were recorded after the second call."""
    num_not_recorded: int
    """Graphs that a mode with CUDA graphs has not recorded."""


class Cause(StrEnum):
    """Why there is no win, in the order in which it is looked for."""

    WRONG = "wrong outputs"
    NOT_COMPARED = "outputs not compared"
    RECOMPILES = "recompiles"
    BREAKS = "graph breaks"
    SHAPES = "shapes unstable under CUDA graphs"
    NOISE = "faster, within the noise of this machine"
    LIBRARY = "library-bound"
    LAUNCHES = "launch-bound"
    UNCHANGED = "kernels unchanged"
    UNKNOWN = "none of the known causes"


class Advice(Frozen):
    """What to do."""

    use: str
    """`eager` or a mode."""
    cause: Cause | None
    """Why nothing is faster than eager, or cannot be called so; None for a win."""
    says: str
    """The advice in one line."""

    @property
    def is_win(self) -> bool:
        """True when a compiled program is faster than eager and right."""
        return self.cause is None
