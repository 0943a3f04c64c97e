from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.report import samples
from tpcompile.evidence.records import Status, Verdict
from tpcompile.evidence.records.findings import Parted, Went
from tpcompile.report import console, lines, show, terminal, wording

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
    assert len(found) == 5
    divergence = samples.divergence()
    assert all(part in found[0] for part in (divergence.title, divergence.layer.value, divergence.cls.value))
    assert "rank 7: " in found[2]
    assert f" at {samples.LINE}" in found[3], "a line that the sides share"
    assert found[4].endswith(divergence.advice)


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


def test_one_finding_is_said_once() -> None:
    """The check that found what the lead says, its line, equal details, and what follows from it."""
    says = "argument 2 of node 4 (mul) is 1 on ranks 0-6 and 8 on rank 7, in block.py:12 and in the lines that follow"
    lead = samples.LEAD.model_copy(update={"says": says, "line": samples.LINE})
    found = samples.check(name="found", status=Status.FAIL, observed=says, line=samples.LINE, details=("a", "b", "a"))
    other = samples.check(name="other", status=Status.FAIL, observed="other", line=samples.OTHER_LINE)
    follows = [samples.check(name=name, status=Status.FAIL, is_consequence=True) for name in ("one", "two")]
    verdict = samples.failing().model_copy(update={"lead": lead, "checks": (found, other, *follows)})
    text = piped(verdict)
    (row,) = [line for line in text if line.startswith("FAIL mode C, found")]
    assert wording.SAID in row and says not in row and samples.LINE.file not in row
    assert row.endswith("; a (2 times); b")
    assert [samples.OTHER_LINE.file in line for line in text if line.startswith("FAIL mode C, other")] == [True]
    (last,) = [line for line in text if line.endswith(": one; two")]
    assert last.startswith("follows") and not any(line.startswith("FAIL mode C, one") for line in text)


def test_the_line_in_which_it_is_seen_and_the_one_at_which_the_ranks_parted() -> None:
    seen, origin = samples.LINE, samples.OTHER_LINE
    sides = tuple(Went(ranks=(rank,), how="value", line=origin, value=f"returns {rank}") for rank in range(2))
    parted = Parted(line=origin, times=0, sides=sides)
    lead = samples.LEAD.model_copy(update={"line": origin, "seen_at": seen, "parted": parted})
    text = piped(samples.failing().model_copy(update={"lead": lead}))
    assert f"at {seen}" in text[1] and text[1].startswith("cause: ")
    assert f" parted at {origin}" in text[2]
    assert "rank 0 returns 0" in text[2] and "rank 1 returns 1" in text[2]
    (last,) = [line for line in text if line.startswith("do first")]
    assert f"{Path(origin.file).name}:{origin.line}:" in last, "it is mended where it comes from"


def test_values_of_one_line_that_depend_on_the_rank_are_one_line() -> None:
    taints = tuple(samples.taint(text=text) for text in ("a", "b", "c"))
    text = [line for line in piped(samples.failing().model_copy(update={"taints": taints})) if "depends on" in line]
    assert len(text) == 1 and re.search(r"\b2 more\b", text[0])
