from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.report import samples
from tpcompile.evidence.records import RankGroup, Verdict, value_item
from tpcompile.evidence.rundir import RunDir
from tpcompile.report import show
from tpcompile.report.show import MAX_LINES


def shown(verdict: Verdict, run: Path | None, *, amount: show.Amount = "all", width: int = 80) -> list[str]:
    """The lines that a terminal gets."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    show.show(verdict, console, run=run, amount=amount)
    return out.getvalue().splitlines()


def huge() -> Verdict:
    """Three differences with four sides each, every side longer than a screen."""
    groups = tuple(RankGroup(ranks=(n,), item=value_item("item", "word " * 400)) for n in range(4))
    found = tuple(samples.divergence(groups=groups, title=f"difference of argument {n}") for n in range(3))
    return samples.failing().model_copy(update={"divergences": found})


@pytest.mark.parametrize("width", [40, 80])
def test_a_terminal_gets_at_most_200_lines_and_the_name_of_the_file_with_the_rest(tmp_path: Path, width: int) -> None:
    run = RunDir.create(tmp_path / "run")
    lines = shown(huge(), run.path, width=width)
    assert len(lines) <= MAX_LINES
    (rest,) = [line for line in lines if line.endswith(f"more lines: {run.path / 'report.txt'}")]
    assert lines.index(rest) > MAX_LINES // 2
    assert lines[-1].endswith(f" report {run.path}")
    assert (run.path / "report.txt").read_text().count("difference ") >= 3


def test_a_report_that_fits_is_whole_and_leaves_no_file(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    assert not [line for line in shown(samples.failing(), run.path) if "more lines" in line]
    assert not (run.path / "report.txt").exists()


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    lines = shown(huge(), tmp_path / "run")
    assert [line for line in lines if "not written" in line and str(tmp_path / "run") in line]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_quiet_is_the_last_lines_only(is_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=is_terminal, color_system=None)
    show.show(samples.passing(), console, run=Path("x"), amount="last")
    last, replay, page = out.getvalue().splitlines()
    assert page.endswith(" report x")
    assert last.startswith("PASS ") and last.endswith(samples.passing().summary) and replay.endswith(" compare x")


def test_json_is_the_verdict_and_nothing_else() -> None:
    out = io.StringIO()
    show.show(samples.failing(), Console(file=out, width=40), run=Path("x"), amount="json")
    assert Verdict.model_validate(json.loads(out.getvalue())) == samples.failing()


@pytest.mark.parametrize(
    ("quiet", "as_json", "amount"), [(False, False, "all"), (True, False, "last"), (True, True, "json")]
)
def test_json_comes_before_quiet(quiet: bool, as_json: bool, amount: str) -> None:
    assert show.amount(quiet=quiet, json=as_json) == amount
