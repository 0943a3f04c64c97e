"""Measurements of each mode -> which to use, and where none is faster than eager, why and the one thing to do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from tpcompile.fusion.win.mode_records import EAGER, WITH_CUDA_GRAPHS, Advice, Cause, Measured

ERROR_LIMIT = 2.5
"""As the gate's: the error against float64 may be so many times that of eager."""
LEAST_GAIN = 0.03
"""Steps that differ by less count as equal, however quiet the machine is."""
_LIBRARY_SHARE = 0.8
_BUSY_SHARE = 0.6


def decide(measured: Sequence[Measured]) -> Advice:
    """`measured` has at least one mode, in the order of what they cost."""
    wrong = [one for one in measured if is_wrong(one)]
    right = [one for one in measured if not is_wrong(one)]
    best = _cheapest_of_the_fastest(right)
    if best is None:
        return _no_win(wrong[0], Cause.WRONG, ()) if wrong else _no_win(*_reason(right), right)
    if best.error_ratio is None:
        not_compared = f"{Cause.NOT_COMPARED}: {TODO[Cause.NOT_COMPARED]}"
        return Advice(use=best.mode, cause=Cause.NOT_COMPARED, says=f"{_win(best, measured)}; {not_compared}")
    return Advice(use=best.mode, cause=None, says=_win(best, measured))


def speedup(one: Measured) -> float:
    """How much faster than eager: median over rounds."""
    return statistics.median(_ratios(one))


def noise(one: Measured) -> float:
    """Half of the distance between the quartiles of the rounds, as a part of their median; at least LEAST_GAIN."""
    ratios = _ratios(one)
    if len(ratios) < 2:
        return LEAST_GAIN
    low, middle, high = statistics.quantiles(ratios, n=4)
    return max(LEAST_GAIN, (high - low) / 2 / middle)


def is_wrong(one: Measured) -> bool:
    """Whether the outputs are much further from float64 than those of eager; NaN is."""
    return one.error_ratio is not None and not one.error_ratio <= ERROR_LIMIT


def _reason(right: Sequence[Measured]) -> tuple[Measured, Cause]:
    """A mode, and why it is not faster: the first cause that holds, since each would hide those after it.

    What a program does is looked for in every mode, since only some have CUDA graphs; what its kernels need, in the
    cheapest.
    """
    for cause, holds in _OF_PROGRAM:
        for one in right:
            if holds(one):
                return one, cause
    for cause, holds in _OF_KERNELS:
        if holds(right[0]):
            return right[0], cause
    return right[0], Cause.UNKNOWN


def _ratios(one: Measured) -> list[float]:
    return [eager / compiled for eager, compiled in zip(one.eager.step_ms, one.compiled.step_ms, strict=True)]


def _cheapest_of_the_fastest(right: Sequence[Measured]) -> Measured | None:
    """A mode that costs more must be faster, beyond noise, than what is chosen so far; None is eager."""
    best: Measured | None = None
    for one in right:
        before = speedup(best) if best else 1.0
        margin = max(noise(one), noise(best) if best else 0.0)
        if speedup(one) > before * (1 + margin):
            best = one
    return best


def _is_launch_bound(one: Measured) -> bool:
    return one.compiled.busy_share is not None and one.compiled.busy_share < _BUSY_SHARE


def _is_never_replayed(one: Measured) -> bool:
    """Torch runs a graph without recording it when it sees a shape for the first time."""
    return one.mode in WITH_CUDA_GRAPHS and one.num_not_recorded == 0 and one.compiled.num_replays == 0


_Causes = tuple[tuple[Cause, Callable[[Measured], bool]], ...]
_OF_PROGRAM: _Causes = (
    (Cause.RECOMPILES, lambda one: one.num_recompiles > 0),
    (Cause.BREAKS, lambda one: one.num_breaks > 0 or one.num_regions == 0),
    (Cause.SHAPES, lambda one: one.num_rerecorded > 0 or _is_never_replayed(one)),
)
_OF_KERNELS: _Causes = (
    (Cause.LAUNCHES, _is_launch_bound),
    (Cause.LIBRARY, lambda one: one.compiled.library_share >= _LIBRARY_SHARE),
    (Cause.UNCHANGED, lambda one: one.compiled.launches >= one.eager.launches),
)

TODO = {
    Cause.NOT_COMPARED: "make it an nn.Module that runs in float64, with its tensors as parameters",
    Cause.RECOMPILES: "TORCH_LOGS=recompiles names a guard: keep its value in a tensor",
    Cause.BREAKS: "TORCH_LOGS=graph_breaks names an op: take it out of the program",
    Cause.SHAPES: "pad inputs to a few fixed lengths, so that each CUDA graph is recorded once",
    Cause.LAUNCHES: "use reduce-overhead",
}
"""What helps, of which there is a program in repro/fusion/modes.py or the tests; nothing is said of other causes."""


def _no_win(one: Measured, cause: Cause, right: Sequence[Measured]) -> Advice:
    gain = "" if cause is Cause.WRONG else f" ({speedup(one):.2f}x in {one.mode})"
    todo = TODO.get(cause, "")
    has_tried_graphs = any(each.mode in WITH_CUDA_GRAPHS for each in right)
    if cause is Cause.LAUNCHES and has_tried_graphs:
        todo = "CUDA graphs do not help"
    says = f"{EAGER}: {cause}{gain}"
    return Advice(use=EAGER, cause=cause, says=f"{says}: {todo}" if todo else says)


def _win(best: Measured, measured: Sequence[Measured]) -> str:
    others = [f"{one.mode} {_against(one)}" for one in measured if one.mode != best.mode]
    beside = f"; {', '.join(others)}" if others else ""
    return f"{best.mode}: {speedup(best):.2f}x of eager{beside}"


def _against(one: Measured) -> str:
    return "has wrong outputs" if is_wrong(one) else f"{speedup(one):.2f}x"
