"""Which GPUs the cases that run side by side see; the sweep itself is in test_run.py."""

from __future__ import annotations

import pytest

from tests.faults import sweep
from tests.faults.sweep import gpus_of, visible_gpus

FOUR, EIGHT = list("0123"), list("01234567")


@pytest.mark.parametrize(
    ("gpus", "size", "slots"),
    [
        (EIGHT, 2, ["0,1", "2,3", "4,5", "6,7"]),
        (EIGHT, 4, ["0,1,2,3", "4,5,6,7"]),
        (["3", "5"], 2, ["3,5"]),
        (["GPU-a", "GPU-b"], 1, ["GPU-a", "GPU-b"]),
    ],
)
def test_every_slot_has_gpus_of_its_own_while_they_last(gpus: list[str], size: int, slots: list[str]) -> None:
    assert [gpus_of(slot, gpus=gpus, size=size) for slot in range(len(slots))] == slots


@pytest.mark.parametrize(
    ("gpus", "size", "slots"),
    [
        (FOUR, 2, ["0,1", "2,3", "0,1", "2,3"]),
        (FOUR, 3, ["0,1,2", "0,1,2"]),  # the fourth alone is too few
        (["0"], 2, ["0", "0"]),
    ],
)
def test_slots_share_gpus_when_there_are_too_few(gpus: list[str], size: int, slots: list[str]) -> None:
    assert [gpus_of(slot, gpus=gpus, size=size) for slot in range(len(slots))] == slots


def test_a_run_on_cpus_hides_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert visible_gpus("cpu") == []
    assert [gpus_of(slot, gpus=[], size=2) for slot in range(2)] == ["", ""]


def test_nothing_is_hidden_where_there_are_no_gpus() -> None:
    assert gpus_of(1, gpus=None, size=2) is None


@pytest.mark.parametrize(("chosen", "gpus"), [("2,5", ["2", "5"]), ("GPU-a", ["GPU-a"]), ("", [])])
def test_gpus_that_the_caller_chose_are_the_ones(monkeypatch: pytest.MonkeyPatch, chosen: str, gpus: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus("auto") == gpus


@pytest.mark.parametrize(("count", "gpus"), [(2, ["0", "1"]), (0, None)])
def test_gpus_of_the_machine_are_those_the_driver_lists(
    monkeypatch: pytest.MonkeyPatch, count: int, gpus: list[str] | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(sweep, "count_gpus", lambda: count)
    assert visible_gpus("auto") == gpus
