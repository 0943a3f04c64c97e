"""Plots: what is in them, equal files for equal manifests, and one line without matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fusion import samples
from tpcompile.errors import ConfigError
from tpcompile.fusion import plot
from tpcompile.fusion.kinds import COLOURS, Kind
from tpcompile.fusion.manifest_records import Manifest


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    pytest.importorskip("matplotlib")
    return tmp_path / "plot.svg"


def draw(path: Path, *manifests: Manifest) -> str:
    plot.write([(f"manifest {at}", one) for at, one in enumerate(manifests)], path)
    return path.read_text()


def test_a_plot_has_the_totals_and_every_launch_in_order(drawn: Path) -> None:
    text = draw(drawn, samples.manifest(samples.graph(8)))
    shown = ["one kernel per op", "launched", "graph 0/0 forward", "op1  extern 1", "op2  poi 2", "op6  copy 6"]
    places = [text.index(one) for one in shown]
    assert places[2:] == sorted(places[2:])
    assert "op5" not in text  # a wait
    assert all(color.lower() in text.lower() for kind, (_, color) in COLOURS.items() if kind is not Kind.LOOPS)


def test_two_manifests_are_side_by_side(drawn: Path) -> None:
    text = draw(drawn, samples.manifest(samples.graph(7)), samples.manifest(samples.graph(3)))
    assert "manifest 0: torch 2.13.0, sm_90" in text
    assert "manifest 1: torch 2.13.0, sm_90" in text


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_equal_manifests_give_equal_files(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / f"{name}{suffix}" for name in ("first", "second")]
    for path in paths:
        plot.write([("manifest", samples.manifest(samples.graph(9)))], path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_graph_without_decisions_has_the_launched_total_alone(drawn: Path) -> None:
    graph = samples.graph(5).model_copy(update={"decisions": None})
    text = draw(drawn, samples.manifest(graph, samples.graph(5, phase="backward")))
    assert "launched" in text
    assert "before fusion" not in text


def test_a_program_that_compiled_nothing_can_be_drawn(drawn: Path) -> None:
    assert "launched" in draw(drawn, samples.manifest())


def test_a_name_that_is_too_long_does_not_reach_the_plot_whole(drawn: Path) -> None:
    text = draw(drawn, samples.manifest(samples.graph(1)))
    assert "an_operator_with_a_long_name_0 +11" in text
    assert "an_operator_with_a_long_name_1 " not in text


def test_more_launches_than_a_plot_can_hold_are_one_line(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "_MOST_ROWS", 20)
    with pytest.raises(ConfigError, match=r"20 launches.* 26"):
        draw(drawn, samples.manifest(samples.graph(29)))
    assert not drawn.exists()


def test_a_different_suffix_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plot\.pdf: .*\.svg or \.png"):
        plot.write([("manifest", samples.manifest(samples.graph(1)))], tmp_path / "plot.pdf")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what `import` refuses as if it were not there
    with pytest.raises(ConfigError, match=r"needs matplotlib.*pip install 'tpcompile\[plot\]'") as raised:
        plot.write([("manifest", samples.manifest(samples.graph(1)))], tmp_path / "plot.svg")
    assert raised.value.exit_code == 2
