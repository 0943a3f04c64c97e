"""The plot of a report: every program, its ratio, and equal files for equal reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench_peers import plot
from tests.bench.samples import measured, report, row
from tpcompile.bench.records import Report
from tpcompile.bench.table import lines
from tpcompile.errors import ConfigError


def draw(path: Path) -> str:
    rows = [row("A", 8.0, 8.0), row("C", 1.0, 1.0), row("hooks", 0.5, 0.5, error_ratio=40.0), row("B", why_not="no")]
    plot.write(report(measured(rows), measured(rows, preset="wan14b")), path)
    return path.read_text()


def test_a_plot_has_the_programs_of_all_presets_with_their_ratios(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = draw(tmp_path / "one.svg")
    for text in ("wan14b_8: ms", "wan14b: ms", "1, 8.0x A", "0.5, outputs differ", "FLOPs per byte of weights"):
        assert text in shown
    assert shown == draw(tmp_path / "two.svg")


def test_a_floor_that_a_program_beats_is_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "wan14b_8: ms, floor 0.25 (dotted)" in draw(tmp_path / "plot.svg")
    plot.write(report(measured([row("C", 0.2, 0.2)])), tmp_path / "beaten.svg")
    shown = (tmp_path / "beaten.svg").read_text()
    assert "wan14b_8: ms" in shown and "floor" not in shown


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"svg or \.png"):
        plot.write(report(measured([row("C", 1.0)])), tmp_path / "plot.pdf")


def test_the_committed_results_are_drawn_and_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = Path(__file__).resolve().parents[2] / "results"
    for name in ("h100x2-bench_wan14b_8-7", "h100x2-bench_wan14b_256-4", "h100x2-bench_wan14b-6"):
        found = Report.model_validate_json((results / f"{name}.json").read_text())
        plot.write(found, tmp_path / f"{name}.svg")
        (one,) = found.measured
        assert found.machine is not None and found.schema_version == 2
        shown = "\n".join(map(str, lines(one, found.machine, world_size=2)))
        assert "best peer: hooks:graphed" in shown and "FAIL" not in shown
