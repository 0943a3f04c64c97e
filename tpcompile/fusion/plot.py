"""One or two manifests -> a plot of their kernels and bytes, SVG or PNG; needs matplotlib, the extra `plot`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpcompile.errors import ConfigError
from tpcompile.fusion import record_files
from tpcompile.fusion.kinds import COLOURS, Kind, kind_of, label, ops_text, size_text
from tpcompile.fusion.manifest import total, total_before, total_of
from tpcompile.fusion.manifest_records import Launch, Manifest, Role, Totals

SUFFIXES = (".svg", ".png")
_ROW_INCHES = 0.18
_TOTALS_INCHES = 0.7
_TOP_INCHES = 2.2
"""What is above the launches: title, totals, legend."""
_SIDE_INCHES = 9.0
_DPI = 100
_LABEL = 44
"""Characters of the ops of a launch."""
_NAME = 60
"""Characters of the path of a manifest: its end is shown."""
_MOST_ROWS = 3000
"""A PNG has at most 65,536 rows of pixels."""
_PER_OP, _BEFORE, _LAUNCHED = "one kernel per op", "before fusion", "launched"
_STAGES = {_PER_OP: "#BBBBBB", _BEFORE: "#888888", _LAUNCHED: "#333333"}
FIXED = {"svg.hashsalt": "tpcompile", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 8.0}
"""Equal files for equal manifests; the words of an SVG stay text."""


def check_suffix(path: Path) -> None:
    """Raises ConfigError for a file that is neither SVG nor PNG."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: a plot is written as {' or '.join(SUFFIXES)}")


def write(named: Sequence[tuple[str, Manifest]], path: Path) -> None:
    """Draw the manifests side by side: totals, then all launches in order with the bytes that each moves.

    Raises ConfigError without matplotlib, or for more launches than a plot can hold.
    """
    check_suffix(path)
    matplotlib = matplotlib_of()
    sides = [Side.of(name, manifest) for name, manifest in named]
    most = max(len(side.rows) for side in sides)
    if most > _MOST_ROWS:
        raise ConfigError(
            f"a plot holds {_MOST_ROWS} launches, and there are {most}; `tpcompile fusion show` lists them"
        )
    totals = [one for side in sides for one in side.totals.values()]
    scale = Scale(
        kernels=max(one.kernels for one in totals),
        bytes=max(one.bytes for one in totals),
        launch_bytes=max(side.widest for side in sides),
    )
    height_inches = _TOP_INCHES + _ROW_INCHES * most
    with matplotlib.rc_context(FIXED):
        figure = matplotlib.figure.Figure(figsize=(_SIDE_INCHES * len(sides), height_inches), layout="constrained")
        parts = figure.subfigures(1, len(sides), squeeze=False)[0]
        for part, side in zip(parts, sides, strict=True):
            _draw(part, side, most=most, scale=scale)
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        with record_files.writing(path):
            figure.savefig(path, metadata=metadata, dpi=_DPI)


def matplotlib_of() -> Any:
    """The package with what plots use of it. Raises ConfigError where it is not installed."""
    try:
        import matplotlib.figure
        import matplotlib.patches
    except ModuleNotFoundError as error:
        raise ConfigError(f"a plot needs {error.name}, which is not installed: pip install 'tpcompile[plot]'") from None
    return matplotlib


# What is drawn


@dataclass(frozen=True)
class Row:
    """A line of the plot: a launch, or the beginning of a graph, whose `launch` is None."""

    text: str
    launch: Launch | None = None


@dataclass(frozen=True)
class Side:
    """One manifest."""

    title: str
    rows: Sequence[Row]
    totals: Mapping[str, Totals]
    """Stage -> kernels and bytes."""

    @classmethod
    def of(cls, name: str, manifest: Manifest) -> Side:
        """The title names the manifest, which may be a path."""
        shown = name if len(name) <= _NAME else f"...{name[3 - _NAME :]}"
        title = f"{shown}: torch {manifest.torch}, {manifest.device}"
        return cls(title=title, rows=list(_rows(manifest)), totals=_totals(manifest))

    @property
    def widest(self) -> int:
        """Bytes of the largest launch."""
        return max((row.launch.bytes for row in self.rows if row.launch is not None), default=0)


def _rows(manifest: Manifest) -> Iterator[Row]:
    for graph in manifest.graphs:
        yield Row(f"graph {graph.compile_id or '-'} {graph.phase}")
        for at, launch in enumerate(graph.launches):
            if launch.role is Role.WAIT:
                continue
            ops = ops_text(launch, _LABEL)
            yield Row(f"{ops}  {label(launch)} {at}", launch)


def _totals(manifest: Manifest) -> dict[str, Totals]:
    """Those of all graphs; stages that not all of them know are left out."""
    ops, before, launched = [], [], []
    for graph in manifest.graphs:
        launched.append(total(graph.launches))
        if graph.decisions is not None:
            ops.append(graph.decisions.ops)
            before.append(total_before(graph.decisions))
    of_all = {_LAUNCHED: total_of(launched)}
    if len(ops) < len(launched):
        return of_all
    return {_PER_OP: total_of(ops), _BEFORE: total_of(before), **of_all}


@dataclass(frozen=True)
class Scale:
    """What fills the width on all sides."""

    kernels: int
    bytes: int
    launch_bytes: int


# Drawing


def _draw(part: Any, side: Side, *, most: int, scale: Scale) -> None:
    part.suptitle(side.title, x=0.01, horizontalalignment="left", fontweight="bold")
    heights = [_TOTALS_INCHES, _ROW_INCHES * most]
    grid = part.add_gridspec(2, 2, height_ratios=heights)
    kernels, moved = part.add_subplot(grid[0, 0]), part.add_subplot(grid[0, 1])
    _draw_totals(kernels, {stage: one.kernels for stage, one in side.totals.items()}, str, scale.kernels)
    kernels.set_title("kernels", loc="left")
    _draw_totals(moved, {stage: one.bytes for stage, one in side.totals.items()}, size_text, scale.bytes)
    moved.set_title("bytes, without collectives", loc="left")
    moved.set_yticklabels([])
    launches = part.add_subplot(grid[1, :])
    _draw_launches(launches, side.rows, scale.launch_bytes)
    launches.set_ylim(most - 0.4, -0.6)


def _draw_totals(axes: Any, numbers: Mapping[str, int], text: Callable[[int], str], most: int) -> None:
    bars = axes.barh(list(numbers), list(numbers.values()), color=[_STAGES[stage] for stage in numbers])
    axes.bar_label(bars, labels=[text(number) for number in numbers.values()], padding=3)
    axes.set_xlim(0, 1.25 * most or 1)
    axes.set_ylim(len(_STAGES) - 0.5, -0.5)
    _without_frame(axes)


def _draw_launches(axes: Any, rows: Sequence[Row], widest: int) -> None:
    """A bar for each launch from the top, a bold line for each graph."""
    for at, row in enumerate(rows):
        if row.launch is not None:
            axes.barh(at, row.launch.bytes, color=COLOURS[kind_of(row.launch)][1], height=0.75)
            axes.text(row.launch.bytes, at, f" {size_text(row.launch.bytes)}", verticalalignment="center")
    axes.set_yticks(range(len(rows)), [row.text for row in rows])
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("normal" if row.launch is not None else "bold")
    axes.set_xlim(0, 1.15 * widest or 1)
    _without_frame(axes)
    # The kinds that there are, above the launches.
    drawn = {kind_of(row.launch) for row in rows if row.launch is not None}
    shown = [kind for kind in Kind if kind in drawn]
    handles = [matplotlib_of().patches.Patch(color=COLOURS[kind][1], label=str(kind)) for kind in shown]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(shown) or 1,
        columnspacing=1.2,
        handlelength=1.2,
        borderaxespad=0,
        frameon=False,
    )


def _without_frame(axes: Any) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xticks([])
