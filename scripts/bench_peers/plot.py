"""A report -> an SVG or PNG: per preset the time of each program against the floor, and a roofline.

    python scripts/bench_peers/plot.py bench.json bench.svg

The report is a file of `tpcompile bench --json`; it needs `pip install 'tpcompile[plot]'`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tpcompile.bench.ratios import beats_floor, ratios_of
from tpcompile.bench.records import Measured, Report, Role, Row
from tpcompile.fusion import record_files
from tpcompile.fusion.plot import FIXED, check_suffix, matplotlib_of

_COLORS = {Role.OURS: "#0072B2", Role.PEER: "#D55E00", Role.MODE: "#888888", Role.COMPUTE: "#009E73"}
_SIDE_INCHES, _ROW_INCHES, _ROOF_INCHES, _OTHER_INCHES = 6.0, 0.22, 2.6, 1.6
_DPI = 120
_AROUND = 30.0
"""The roofline is drawn so many times to both sides of its corner, and at least to the preset."""


def write(report: Report, path: Path) -> None:
    """Presets side by side: bars of ms with the ratio to A, and FLOP/s against FLOPs per byte.

    Raises ConfigError for a file that is neither SVG nor PNG, and without matplotlib.
    """
    check_suffix(path)
    matplotlib = matplotlib_of()
    most = max(len(_timed(one)) for one in report.measured)
    size = (_SIDE_INCHES * len(report.measured), _ROW_INCHES * most + _ROOF_INCHES + _OTHER_INCHES)
    with matplotlib.rc_context(FIXED):
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        grid = figure.add_gridspec(2, len(report.measured), height_ratios=[_ROW_INCHES * most + 0.5, _ROOF_INCHES])
        for column, measured in enumerate(report.measured):
            _draw_times(figure.add_subplot(grid[0, column]), measured)
            _draw_roofline(figure.add_subplot(grid[1, column]), measured)
        figure.suptitle(_title(report), x=0.01, horizontalalignment="left", fontweight="bold")
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        with record_files.writing(path):
            figure.savefig(path, metadata=metadata, dpi=_DPI)


def _title(report: Report) -> str:
    machine = report.machine
    where = "" if machine is None else f"{machine.device}, torch {machine.torch}; "
    return f"{where}{report.world_size} ranks"


def _timed(measured: Measured) -> list[Row]:
    return [row for row in measured.rows if row.rounds_ms]


def _draw_times(axes: Any, measured: Measured) -> None:
    """Draw ms on a logarithmic axis, since A and the fastest are an order of magnitude apart."""
    rows = _timed(measured)
    colors = [_COLORS[row.role] for row in rows]
    times = [row.median_ms for row in rows]
    axes.barh(range(len(rows)), times, color=colors, height=0.75)
    for at, row in enumerate(rows):
        axes.text(row.median_ms, at, f" {_label(measured, row)}", verticalalignment="center")
    title = f"{measured.preset}: ms"
    if beats_floor(measured) is None:
        axes.axvline(measured.bound.ms, color="black", linestyle=":", linewidth=1)
        title += f", floor {measured.bound.ms:.3g} (dotted)"
    axes.set_yticks(range(len(rows)), [_short(row.name) for row in rows])
    axes.set_xscale("log")
    axes.set_xlim(min([measured.bound.ms, *times]) / 1.5, 4 * max(times, default=measured.bound.ms))
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _short(name: str) -> str:
    """The name of a program without the folder of its file."""
    return name.rpartition("/")[2]


def _label(measured: Measured, row: Row) -> str:
    if measured.differs(row):
        return f"{row.median_ms:.3g}, outputs differ"
    ratio = ratios_of(measured, row).faster_than_a
    return f"{row.median_ms:.3g}, {ratio:.1f}x A" if ratio is not None else f"{row.median_ms:.3g}"


def _draw_roofline(axes: Any, measured: Measured) -> None:
    """Draw the FLOP/s of one rank that programs reach, under the measured rates of reading and of products."""
    floors, least = measured.floors, measured.bound
    intensity = least.flops / least.weight_bytes
    corner = floors.gemm_tflops * 1e3 / floors.read_gbytes_per_s
    low, high = min(intensity, corner) / _AROUND, max(intensity, corner) * _AROUND
    axes.plot([low, corner, high], [low * floors.read_gbytes_per_s / 1e3, *[floors.gemm_tflops] * 2], color="black")
    for row in _timed(measured):
        if row.role is not Role.MODE or row.name == "A":
            reached = least.flops / row.median_ms / 1e9
            axes.plot(intensity, reached, "o", color=_COLORS[row.role], markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte of weights")
    axes.set_ylabel("TFLOP/s of a rank")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    write(Report.model_validate_json(source.read_text()), target)
