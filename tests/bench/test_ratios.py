"""Ratios: round by round, between equal outputs only; what fails a run."""

from __future__ import annotations

import math
import re

import pytest

from tests.bench.samples import MACHINE, measured, report, row
from tpcompile.bench.ratios import best_peer, failures, ratios_of
from tpcompile.bench.records import Report
from tpcompile.bench.run import in_turn
from tpcompile.bench.table import lines

A = row("A", 8.0, 4.0, regions_per_call=20.0)
C = row("C", 1.0, 2.0)


def text(*rows: object) -> str:
    return "\n".join(str(line) for line in lines(measured(rows), MACHINE, world_size=2))


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    ratio = ratios_of(measured([A, C]), C).faster_than_a
    assert ratio == 5.0  # and not 6 / 1.5


def test_each_round_begins_with_the_next_program() -> None:
    assert ["".join(in_turn("abc", number)) for number in range(4)] == ["abc", "bca", "cab", "abc"]


def test_the_best_peer_is_the_fastest_of_those_whose_outputs_are_right() -> None:
    peers = [row("dtensor", 3.0, 3.0), row("hooks", 0.5, 0.5, error_ratio=40.0), row("dtensor:graphed", 2.0, 2.0)]
    found = measured([C, *peers])
    assert best_peer(found) == peers[2]
    assert ratios_of(found, C).faster_than_peer == 1.5


def test_floor_and_compute_only_are_what_a_program_is_a_multiple_of() -> None:
    found = measured([C, row("compute", 1.0, 1.0), row("compute:graphed", 0.5, 0.5)])
    ratios = ratios_of(found, C)
    assert ratios.of_floor == 1.5 / 0.25
    assert ratios.of_compute == 3.0


@pytest.mark.parametrize("name", ["C:graphed", "compute:graphed", "hooks:graphed"])
def test_a_floor_that_a_program_beats_is_none(name: str) -> None:
    faster = row(name, 0.24, 0.24)
    assert ratios_of(measured([C, faster]), C).of_floor is None
    shown = text(C, faster)
    assert f"no floor, {name} takes 0.24 ms" in shown
    assert "floor 0.25 ms" not in shown


def test_a_program_with_different_outputs_beats_no_floor() -> None:
    assert "floor 0.25 ms" in text(C, row("hooks", 0.1, 0.1, error_ratio=40.0))


@pytest.mark.parametrize("error", [2.6, math.inf, math.nan, None])
def test_outputs_that_differ_have_no_ratio_and_fail_the_run(error: float | None) -> None:
    wrong = row("C", 1.0, 2.0, error_ratio=error)
    found = measured([A, wrong])
    ratios = ratios_of(found, wrong)
    assert [ratios.faster_than_a, ratios.of_floor] == [None, None]
    assert len(failures(found)) == 1
    assert "wan14b_8 C: outputs" in failures(found)[0]
    assert "differ" in text(A, wrong)


def test_programs_of_a_different_model_have_ratios_among_themselves_only() -> None:
    before, after = (
        row(f"{name}.py:build", *ms, reference="7.25") for name, ms in (("before", (2, 2)), ("after", (1, 1)))
    )
    found = measured([A, C, before, after, row("dtensor", 4.0, 4.0), row("compute", 1.0, 1.0)])
    ratios = ratios_of(found, before)
    assert [ratios.faster_than_a, ratios.of_floor, ratios.of_compute] == [None] * 3
    assert ratios.faster_than_peer == 0.5
    assert ratios_of(found, C).faster_than_peer == 3.0  # of dtensor, although `after` is faster
    (line,) = [one for one in text(A, before).splitlines() if one.startswith("before.py:build")]
    assert line.split()[:4] == ["before.py:build", "2.000", "0.000", "-"]


def test_a_wrong_mode_a_takes_the_ratios_of_all_others() -> None:
    found = measured([A.model_copy(update={"error_ratio": 9.0}), C])
    assert ratios_of(found, C).faster_than_a is None


def test_equal_outputs_in_one_region_pass() -> None:
    assert failures(measured([A, C, row("compute", 1.0, error_ratio=1e6)])) == []


def test_several_regions_where_one_is_the_contract_fail_the_run() -> None:
    (failure,) = failures(measured([row("C", 1.0, regions_per_call=15.0)]))
    assert failure.startswith("wan14b_8 C:") and "15" in failure


def test_a_failure_of_ours_fails_the_run_and_that_of_a_peer_or_a_refusal_does_not() -> None:
    peer, refused = row("dtensor", why_not="rank 0: no", has_failed=True), row("C:graphed", why_not="needs GPUs")
    assert failures(measured([peer, refused])) == []
    assert len(failures(measured([row("C", why_not="rank 0: no", has_failed=True)]))) == 1


def test_the_table_has_the_numbers_of_every_program_and_the_reason_of_those_without() -> None:
    shown = text(A, C, row("C:graphed", why_not="needs GPUs"))
    (line,) = [one for one in shown.splitlines() if one.startswith("C ")]
    assert line.split() == [
        *("C", "1.500", "0.250", "5333"), *("80", "1", "0.050", "-", "-", "-", "1"), *("5.00", "-", "6.00", "-"),
    ]  # fmt: skip
    assert "C:graphed   needs GPUs" in shown
    (floor,) = [one for one in shown.splitlines() if one.startswith("floor")]
    assert re.findall(r"[\d.]+ [a-zA-Z/]+", floor) == ["0.25 ms", "0.025 ms", "800 TFLOP/s", "0.25 ms", "4000 GB/s"]


def test_spread_is_half_of_the_range_between_the_quartiles() -> None:
    one = row("C", 1.0, 2.0, 3.0, 4.0, 100.0)
    assert (one.median_ms, one.spread_ms) == (3.0, 1.0)
    assert row("C", 1.0).spread_ms == 0.0


def test_a_report_is_read_as_it_was_written() -> None:
    written = report(measured([A, row("C", 1.0, error_ratio=math.inf)]))
    assert Report.model_validate_json(written.to_json()) == written
