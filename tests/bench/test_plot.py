"""The plot of a report: every program, its ratio, and equal files for equal reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench_peers import plot
from tests.bench.samples import measured, report, row
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


def test_another_suffix_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"svg or \.png"):
        plot.check(tmp_path / "plot.pdf")
