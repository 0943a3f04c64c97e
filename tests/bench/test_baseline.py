"""A baseline: what a later run must not exceed, of which class a change is, and what only warns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.samples import PROFILE, measured, report, row
from tpcompile.bench import baseline
from tpcompile.bench.baseline import Baseline
from tpcompile.bench.names import Name
from tpcompile.bench.records import Role, Row
from tpcompile.errors import ConfigError
from tpcompile.fusion.diff import Change

A = row("A", 8.0, 8.0, regions_per_call=20.0)
C = row("C:graphed", 1.0, 1.0)


def good() -> Baseline:
    return baseline.written(Baseline(), report(measured([A, C])))


def found(now: Row, **changed: Any) -> list[tuple[Change, str, bool]]:
    run = measured([A, now], **changed)
    return [(one.change, one.says, one.is_time) for one in baseline.regressions(good(), run, report(run))]


def test_the_same_run_is_as_its_baseline() -> None:
    assert found(C) == []


def profiled(**counts: int | None) -> Row:
    return row("C:graphed", 1.0, 1.0, profile=PROFILE.model_copy(update=counts))


@pytest.mark.parametrize(
    ("now", "change", "says", "is_time"),
    [
        (row("C:graphed", 9.0, 9.0, regions_per_call=15.0), Change.OVERHEAD, "1 -> 15 compiled regions a call", False),
        (profiled(kernels=84), Change.FUSION, "80 -> 84 kernels a step", False),
        (profiled(kernels=None), Change.FUSION, "80 -> an unknown number of kernels a step", False),
        (profiled(launches=80), Change.OVERHEAD, "1 -> 80 launches of the host a step", False),
        (row("C:graphed", 1.2, 1.2), Change.CHOICE, "time 0.125 -> 0.15 of mode A, 4 -> 4.8 of the floor", True),
        (row("C:graphed", 1.0, 1.0, error_ratio=9.0), Change.OVERHEAD, "not measured: outputs differ", False),
        (row("C:graphed", why_not="rank 0: no", has_failed=True), Change.OVERHEAD, "not measured: rank 0: no", False),
    ],
)
def test_a_change_has_the_class_of_its_cause_and_only_times_warn(
    now: Row, change: Change, says: str, is_time: bool
) -> None:
    assert found(now) == [(change, says, is_time)]


def test_what_is_better_or_not_asked_for_is_no_regression() -> None:
    assert found(profiled(kernels=70)) == []
    both = baseline.written(Baseline(), report(measured([A, C, row("C", 2.0, 2.0)])))
    run = measured([A, C])
    assert list(baseline.regressions(both, run, report(run))) == []


def test_a_run_with_no_program_of_the_baseline_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NVIDIA H200.* C:graphed"):
        found(row("C", 5.0, 5.0))


def test_other_cases_have_no_baseline_and_say_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"NVIDIA H200.* 4680 .*NVIDIA H200.* 8 "):
        found(C, tokens=4680)


def test_writing_replaces_a_case_and_keeps_the_others() -> None:
    both = baseline.written(good(), report(measured([A, C], preset="wan14b", tokens=4680)))
    assert [case.preset for case in both.cases] == ["wan14b", "wan14b_8"]
    again = baseline.written(both, report(measured([A, row("C:graphed", 2.0, 2.0)])))
    assert [case.programs["C:graphed"].of_a for case in again.cases] == [0.125, 0.25]
    assert Baseline.model_validate_json(again.to_json()) == again


def test_a_run_that_ended_early_is_no_baseline() -> None:
    with pytest.raises(ConfigError, match="ended early"):
        baseline.written(Baseline(), report(measured([A, C], ended_early="C: rank 1 died")))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    with pytest.raises(ConfigError, match="--write-baseline"):
        baseline.read(path)
    path.write_text('{"schema_version": 2, "cases": [{}]}')
    with pytest.raises(ConfigError, match=r"cases\.0\.device"):
        baseline.read(path)
    path.write_text('{"schema_version": 1, "cases": []}')
    with pytest.raises(ConfigError, match=r"1, .* 2;"):
        baseline.read(path)


def test_the_committed_figures_are_of_programs_that_there_are_each_in_one_region() -> None:
    committed = baseline.read(Path(__file__).resolve().parents[2] / "configs" / "performance.json")
    assert {case.preset for case in committed.cases} == {"wan14b", "wan14b_256", "wan14b_8"}
    for case in committed.cases:
        assert case.programs and case.made_with.startswith(f"tpcompile bench --nproc {case.world_size} ")
        for name, figures in case.programs.items():
            assert Name.of(name).role == Role.OURS and figures.regions == 1
