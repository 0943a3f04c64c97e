"""All ranks of a group use the same cell, whichever of them has one; none waits for one that is gone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.by_size import tuned_ranks as ranks
from tpcompile.by_size import tuned
from tpcompile.by_size.table import MeasuredInFlight, Table, least_pushed, shipped
from tpcompile.by_size.tuned import Brought, settle
from tpcompile.testing import run_on_ranks

ONE_SHOT, TWO_SHOT = "4096:one_shot", "4096:two_shot"


def rows(found: list[dict[str, Any]]) -> list[str]:
    assert len({one["digest"] for one in found}) == 1
    return [one["rows"] for one in found]


def measured(found: list[dict[str, Any]]) -> list[int]:
    return [one["measured"] for one in found]


def test_ranks_without_a_cell_measure_once_use_that_of_the_lowest_and_keep_it(tmp_path: Path) -> None:
    found = run_on_ranks(ranks.nobody_has_one, str(tmp_path))
    assert rows(found) == [ONE_SHOT] * 2 and measured(found) == [1, 1]
    assert [(one["kept"], one["files"]) for one in found] == [(ONE_SHOT, 1)] * 2
    assert "2 x NVIDIA Test 1 measured in" in found[0]["said"] and found[1]["said"] == ""
    again = run_on_ranks(ranks.nobody_has_one, str(tmp_path))
    assert rows(again) == [ONE_SHOT] * 2 and measured(again) == [0, 0]
    assert [one["said"] for one in again] == ["", ""]


@pytest.mark.parametrize(("have", "expected"), [([0], ONE_SHOT), ([1], TWO_SHOT), ([0, 1], ONE_SHOT)])
def test_a_cell_that_one_rank_has_kept_is_that_of_all(have: list[int], expected: str, tmp_path: Path) -> None:
    found = run_on_ranks(ranks.kept, str(tmp_path), have)
    assert rows(found) == [expected] * 2 and measured(found) == [0, 0]


def test_what_is_kept_is_measured_again_where_that_is_asked_for(tmp_path: Path) -> None:
    found = run_on_ranks(measures_anew, str(tmp_path))
    assert rows(found) == [ONE_SHOT] * 2 and measured(found) == [1, 1]


def measures_anew(folder: str) -> dict[str, Any]:
    return ranks.kept(folder, [1], uses_kept=False)


@pytest.mark.parametrize("text", ["{", '{"gpu": 3}', "\x00"])
def test_a_damaged_cache_is_one_warning_and_measured_anew(text: str, tmp_path: Path) -> None:
    found = run_on_ranks(ranks.damaged, str(tmp_path), text)
    assert rows(found) == [ONE_SHOT] * 2 and measured(found) == [1, 1]
    assert re.search("WARNING.*is damaged", found[0]["said"]) and found[1]["said"] == ""
    assert found[0]["kept"] == ONE_SHOT


def test_a_rank_that_comes_late_sums_by_nccl_as_the_others_do(tmp_path: Path) -> None:
    found = run_on_ranks(ranks.comes_late, str(tmp_path))
    assert rows(found) == ["", ""] and measured(found) == [0, 0]
    assert re.search("WARNING.*NCCL .*: rank 1: .*in time", found[0]["said"])
    assert found[1]["said"] == ""


def test_a_rank_that_dies_while_it_measures_is_not_waited_for(tmp_path: Path) -> None:
    first, _ = run_on_ranks(ranks.dies_in_its_measurement, str(tmp_path), timeout_s=60)
    assert first["rows"] == "" and re.search("NCCL .*: rank 1: .*in time", first["said"])


def test_what_one_rank_cannot_measure_none_uses(tmp_path: Path) -> None:
    found = run_on_ranks(ranks.cannot_measure, str(tmp_path))
    assert rows(found) == ["", ""]
    assert f"rank 1: {ranks.NO_ACCESS};" in found[0]["said"] and found[1]["said"] == ""


def test_a_rank_that_may_not_measure_keeps_all_from_it_with_what_to_do(tmp_path: Path) -> None:
    found = run_on_ranks(ranks.may_not_measure, str(tmp_path))
    assert rows(found) == ["", ""] and measured(found) == [0, 0]
    assert re.search("rank 1: TPCOMPILE_TUNE=0; `tpcompile tune`", found[0]["said"])


def test_a_shipped_cell_is_used_unless_it_is_left_out(tmp_path: Path) -> None:
    (committed,) = [cell for cell in shipped().cells if cell.gpu == ranks.H100]
    found = run_on_ranks(ranks.shipped_cell, str(tmp_path / "shipped"), "0")
    assert rows(found) == [Table(cells=(committed,)).rows(ranks.H100, 2)] * 2
    found = run_on_ranks(ranks.shipped_cell, str(tmp_path / "left out"), "1")
    assert rows(found) == [TWO_SHOT] * 2


def test_groups_of_a_job_that_measure_different_times_use_the_same_cell(tmp_path: Path) -> None:
    found = run_on_ranks(ranks.two_groups, str(tmp_path), world_size=4)
    assert set(rows(found)) <= {ONE_SHOT, TWO_SHOT} and len(set(rows(found))) == 1


def test_settings_and_programs_of_a_group_share_one_measurement(tmp_path: Path) -> None:
    for found in run_on_ranks(ranks.through_sums, str(tmp_path)):
        (text,) = found["texts"]
        assert re.fullmatch(rf"by_size, table \w+: one_shot .* 4096 bytes, nccl .*\(2 x {ranks.GPU}\)", text)
        assert found["measured"] == 1


def test_a_rank_that_sums_by_nccl_alone_is_not_waited_for(tmp_path: Path) -> None:
    found = run_on_ranks(ranks.one_sums_by_nccl, str(tmp_path), timeout_s=60)
    assert re.search('NCCL .*: rank 1: all_reduce="nccl"', found[0]["said"]) and found[1]["said"] == ""
    assert max(one["waited_s"] for one in found) < 30
    assert re.search(f"not measured .*2 x {ranks.GPU}: nccl$", found[0]["first"]) and found[1]["first"] is None
    assert [one["then"] for one in found] == [found[0]["then"]] * 2 and "one_shot" in found[0]["then"]


def test_what_is_kept_is_for_these_settings_of_nccl_and_any_of_its_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    name = tuned._name(ranks.GPU, 2)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert tuned._name(ranks.GPU, 2) == name
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert tuned._name(ranks.GPU, 2) != name


def test_a_group_that_cannot_be_measured_says_so_once(tmp_path: Path) -> None:
    found = run_on_ranks(ranks.not_measurable, str(tmp_path), world_size=3)
    for one in found:
        assert re.fullmatch(f"by_size, table {shipped().digest}: not measured .*3 x {ranks.GPU}: nccl", one["text"])
    assert [one["said"].count("WARNING") for one in found] == [1, 0, 0]


def test_types_that_are_left_to_nccl_are_said_once() -> None:
    (half, *others), on_rank_1 = run_on_ranks(ranks.other_types)
    assert "WARNING: NCCL" in half and re.findall(r"b?float\d+", half) == ["float16", "bfloat16", "float32"]
    assert [*others, *on_rank_1] == [""] * 7


def test_before_a_measurement_one_cell_is_enough_and_after_it_all_must_have_one() -> None:
    brought = {0: Brought(cell=ranks.cell("one_shot")), 1: Brought(obstacle="no memory")}
    assert settle(brought, {}).cell == ranks.cell("one_shot")
    assert settle(brought, {}, has_measured=True).problem == "rank 1: no memory"
    nothing = settle({0: Brought(), 1: Brought()}, {})
    assert (nothing.cell, nothing.problem) == (None, "")
    assert settle({1: brought[1]}, {0: ""}).speaks == 1


def in_flight(*times: tuple[float, ...]) -> list[MeasuredInFlight]:
    """Sizes of 1, 2, 4, ... bytes: NCCL, by the rows and pushed, then all with work beside."""
    names = ("nccl", "by_rows", "push", "nccl_beside", "by_rows_beside", "push_beside")
    found = []
    for step, each in enumerate(times):
        us: Any = dict(zip(names, each, strict=True))
        found.append(MeasuredInFlight(size_bytes=1 << step, us=us))
    return found


FASTER, EQUAL = (10, 10, 9, 20, 20, 19), (10, 10, 9.9, 20, 20, 19)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([FASTER, FASTER], 1), ([EQUAL, FASTER], 2), ([FASTER, EQUAL, FASTER], 4), ([FASTER, EQUAL], None), ([], None),
        ([(10, 10, 9, 20, 20, 21), FASTER], 2), ([(10, 10, 9, 20, 20, 20), FASTER], 1),
        ([(10, 9, 9, 20, 20, 19), FASTER], 2), ([(10, 10, 9, 20, 18, 19), FASTER], 2),
    ],
)  # fmt: skip
def test_sums_are_pushed_from_the_size_on_from_which_it_is_always_faster(times: Any, expected: int | None) -> None:
    assert least_pushed(reversed(in_flight(*times))) == expected
