"""Measurements of each mode -> which to use, and where none is faster than eager, why and the one thing to do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from tpcompile.fusion.win.mode_records import EAGER, WITH_CUDA_GRAPHS, Advice, Cause, Measured

ERROR_LIMIT = 2.5
"""The error against float64 may be so many times that of eager, as in the gate."""
LEAST_GAIN = 0.03
"""Steps that differ by less count as equal, however quiet the machine is."""
_LIBRARY_SHARE = 0.8
_BUSY_SHARE = 0.6


def decide(measured: Sequence[Measured]) -> Advice:
    """`measured` has at least one mode, in the order of what they cost."""
    right = [one for one in measured if not is_wrong(one)]
    best = _cheapest_of_the_fastest(right)
    if best is None:
        return _no_win(measured, right)
    says = f"{best.mode}: {speedup(best):.2f}x of eager"
    others = [one for one in measured if one.mode != best.mode]
    if others:
        beside = [
            f"{one.mode} has wrong outputs" if is_wrong(one) else f"{one.mode} {speedup(one):.2f}x" for one in others
        ]
        says += f"; {', '.join(beside)}"
    if best.error_ratio is not None:
        return Advice(use=best.mode, cause=None, says=says)
    cause = Cause.NOT_COMPARED
    return Advice(use=best.mode, cause=cause, says=f"{says}; {cause}: {TODO[cause]}")


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


def gain_text(one: Measured) -> str:
    """`1.09x +-74%`."""
    return f"{speedup(one):.2f}x +-{noise(one):.0%}"


def is_wrong(one: Measured) -> bool:
    """True when the outputs are much further from float64 than those of eager, or NaN."""
    return one.error_ratio is not None and not one.error_ratio <= ERROR_LIMIT


def _reason(right: Sequence[Measured]) -> tuple[Measured, Cause]:
    """A mode, and why it is not faster: the first cause that holds, since each would hide those after it.

    What a program does is looked for in every mode, since only some have CUDA graphs, and so is noise, since kernels do
    not explain a step that may be faster; what its kernels need, in the cheapest.
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
    best_speedup, best_noise = 1.0, 0.0
    for one in right:
        own_speedup, own_noise = speedup(one), noise(one)
        if own_speedup > best_speedup * (1 + max(own_noise, best_noise)):
            best, best_speedup, best_noise = one, own_speedup, own_noise
    return best


def _is_never_replayed(one: Measured) -> bool:
    """Torch runs a graph without recording it when it sees a shape for the first time."""
    return one.mode in WITH_CUDA_GRAPHS and one.num_not_recorded == 0 and one.compiled.num_replays == 0


_Causes = tuple[tuple[Cause, Callable[[Measured], bool]], ...]
_OF_PROGRAM: _Causes = (
    (Cause.RECOMPILES, lambda one: one.num_recompiles > 0),
    (Cause.BREAKS, lambda one: one.num_breaks > 0 or one.num_regions == 0),
    (Cause.SHAPES, lambda one: one.num_rerecorded > 0 or _is_never_replayed(one)),
    (Cause.NOISE, lambda one: speedup(one) >= 1 + LEAST_GAIN),
)
_OF_KERNELS: _Causes = (
    (Cause.LAUNCHES, lambda one: one.compiled.busy_share is not None and one.compiled.busy_share < _BUSY_SHARE),
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


def _no_win(measured: Sequence[Measured], right: Sequence[Measured]) -> Advice:
    """Eager, and why; `right` are the modes whose outputs are right."""
    if len(right) < len(measured):
        cause, gain = Cause.WRONG, ""
    else:
        one, cause = _reason(right)
        gain = f" ({gain_text(one)} in {one.mode})"
    todo = TODO.get(cause, "")
    has_tried_graphs = any(one.mode in WITH_CUDA_GRAPHS for one in right)
    if cause is Cause.LAUNCHES and has_tried_graphs:
        todo = "CUDA graphs do not help"
    says = f"{EAGER}: {cause}{gain}"
    return Advice(use=EAGER, cause=cause, says=f"{says}: {todo}" if todo else says)


# Lines of a table of at most 100 columns

_TIMED = f"{'mode':16}{'ms':>9}{'eager':>9}{'speed-up':>15}"
_HEAD = f"{_TIMED}{'kernels':>12}{'regions':>8}{'error':>7}{'first s':>9}{'cached':>8}{'cold':>5}"
_MOST = 999


def lines(measured: Sequence[Measured], advice: Advice) -> Iterator[Text]:
    """The last is the one thing to do."""
    yield Text(_HEAD, style="bold")
    for one in measured:
        ms, eager_ms = (statistics.median(side.step_ms) for side in (one.compiled, one.eager))
        gain = gain_text(one)
        kernels = f"{one.eager.launches} -> {one.compiled.launches}"
        error = "-" if one.error_ratio is None else f"{min(one.error_ratio, _MOST):.1f}x"
        cached = "-" if one.cached_s is None else f"{one.cached_s:.1f}"
        timed = f"{one.mode:16}{ms:9.3f}{eager_ms:9.3f}{gain:>15}"
        counted = f"{kernels:>12}{one.num_regions:8}{error:>7}"
        row = f"{timed}{counted}{one.first_call_s:9.1f}{cached:>8}{one.num_cold_calls:5}"
        yield Text(row, style="red" if is_wrong(one) else "")
    for one in measured:
        found = one.wrong_compiled
        if found is not None:
            yield from (Text(f"{one.mode}: {text}") for text in (found.brief, *found.details))
    yield Text(advice.says, style="green" if advice.is_win else "yellow")
