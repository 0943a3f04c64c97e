"""Measurements and advice -> lines of a table of at most 100 columns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rich.text import Text

from tpcompile.fusion.win.decide import gain_text, is_wrong
from tpcompile.fusion.win.mode_records import Advice, Measured

_TIMED = f"{'mode':16}{'ms':>9}{'eager':>9}{'speed-up':>15}"
_HEAD = f"{_TIMED}{'kernels':>12}{'regions':>8}{'error':>7}{'first s':>9}{'cached':>8}{'cold':>5}"
_MOST = 999


def lines(measured: Sequence[Measured], advice: Advice) -> Iterator[Text]:
    """The last is the one thing to do."""
    yield Text(_HEAD, style="bold")
    for one in measured:
        yield Text(_row(one), style="red" if is_wrong(one) else "")
    yield Text(advice.says, style="green" if advice.is_win else "yellow")


def _row(one: Measured) -> str:
    ms, eager_ms = (statistics.median(side.step_ms) for side in (one.compiled, one.eager))
    gain = gain_text(one)
    kernels = f"{one.eager.launches} -> {one.compiled.launches}"
    error = "-" if one.error_ratio is None else f"{min(one.error_ratio, _MOST):.1f}x"
    cached = "-" if one.cached_s is None else f"{one.cached_s:.1f}"
    timed = f"{one.mode:16}{ms:9.3f}{eager_ms:9.3f}{gain:>15}"
    counted = f"{kernels:>12}{one.num_regions:8}{error:>7}"
    return f"{timed}{counted}{one.first_call_s:9.1f}{cached:>8}{one.num_cold_calls:5}"
