"""The detection matrix: when it is right, and what it shows."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from tests.faults.case import CASES
from tests.faults.judge import Outcome, Result
from tests.faults.matrix import Matrix, listing, render, row_of, summary


def result(outcome: Outcome, *, seconds: float | None = None, expected: str = "input stride differs") -> Result:
    return Result(
        name="stride", expected=expected, outcome=outcome, seconds=seconds, why="", columns={"detail": "hang"}
    )


def printed(matrix: Matrix) -> str:
    console = Console(width=150, record=True, file=None, quiet=False)
    with console.capture() as captured:
        render(matrix, console)
    return captured.get()


def test_a_matrix_of_named_and_green_is_right() -> None:
    assert Matrix(results=(result(Outcome.NAMED), result(Outcome.GREEN, expected=""))).is_right


@pytest.mark.parametrize("outcome", [o for o in Outcome if not o.is_right])
def test_any_other_outcome_makes_it_wrong(outcome: Outcome) -> None:
    assert not Matrix(results=(result(Outcome.NAMED), result(outcome))).is_right


def test_a_matrix_without_results_proves_nothing() -> None:
    assert not Matrix(results=()).is_right


def test_the_summary_counts_and_times_the_faults() -> None:
    rows = (result(Outcome.NAMED, seconds=1.0), result(Outcome.NAMED, seconds=3.0), result(Outcome.HANG))
    assert re.fullmatch("2 named, 1 hang; .*: median 2.00 s, worst 3.00 s", summary(Matrix(results=rows)))


def test_the_table_shows_case_outcome_time_and_what_other_tools_say() -> None:
    text = printed(Matrix(results=(result(Outcome.NAMED, seconds=0.5),)))
    assert all(word in text for word in ("stride", "named", "0.50", "detail", "hang"))


def test_the_reason_of_a_wrong_row_is_printed() -> None:
    row = result(Outcome.DETECTED).model_copy(update={"why": "blames rank 0, not 1"})
    assert "stride: detected: blames rank 0, not 1" in printed(Matrix(results=(row,)))


def test_the_listing_holds_every_case() -> None:
    assert listing([row_of(case) for case in CASES.values()]).row_count == len(CASES)
