from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.report import samples
from tpcompile.evidence.records import Status, Verdict
from tpcompile.report import console, lines, show, terminal

LONG_PATH = "/a/folder/with/a/name/that/is/longer/than/eighty/columns/and/so/is/folded/on/a/terminal/model.py"


def long() -> Verdict:
    """A red verdict whose line has a path that no 80 columns hold."""
    line = samples.LINE.model_copy(update={"file": LONG_PATH})
    check = samples.check(name="graph breaks", status=Status.FAIL, line=line, details=("first\nsecond",))
    return samples.failing().model_copy(update={"checks": (check, samples.check(name="one graph"))})


def piped(verdict: Verdict) -> list[str]:
    """What a pipe gets."""
    out = io.StringIO()
    show.show(verdict, Console(file=out, width=80), run=Path("runs/x"))
    return out.getvalue().splitlines()


def test_a_check_is_one_line_with_its_path_whole() -> None:
    (row,) = [line for line in piped(long()) if "graph breaks" in line]
    assert row.startswith("FAIL ") and f"{LONG_PATH}:12" in row and "first | second" in row
    (row,) = [line for line in piped(long()) if "one graph" in line]
    assert row.startswith("PASS ")


def test_on_a_terminal_the_same_path_is_folded() -> None:
    out = io.StringIO()
    terminal.render(long(), Console(file=out, width=80))
    assert LONG_PATH not in out.getvalue()


def test_a_ci_that_forces_color_makes_no_terminal_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Console(file=io.StringIO()).is_terminal
    assert not console.stdout().is_terminal and not console.stderr().is_terminal


def test_every_difference_has_its_cause_its_sides_and_its_advice_on_lines_of_its_own() -> None:
    found = [line for line in piped(samples.failing()) if line.startswith("difference 1 of 1")]
    assert len(found) == 4
    divergence = samples.divergence()
    assert all(part in found[0] for part in (divergence.title, divergence.layer.value, divergence.cls.value))
    assert "rank 7: " in found[2]
    assert found[3].endswith(divergence.advice)


def test_the_report_ends_with_the_outcome_and_what_to_do_with_the_run() -> None:
    assert [line.partition(":")[0] for line in piped(samples.failing())[-3:]] == ["FAIL (exit 1)", "replay", "page"]


def test_many_differences_are_counted() -> None:
    found = tuple(samples.divergence(title=f"argument {n} differs") for n in range(40))
    many = samples.failing().model_copy(update={"divergences": found})
    (rest,) = [line for line in lines.lines(many, command="gate") if "verdict.json" in line]
    assert " 30 " in rest


def test_control_characters_do_not_reach_the_pipe() -> None:
    verdict = samples.passing().model_copy(update={"summary": "red\x1b[31m"})
    assert [line[-12:] for line in piped(verdict) if "\\x1b" in line] == [r" red\x1b[31m"]
