"""What a run of a healthy program left -> its alarms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.alarms import alarms
from tests.faults.case import load
from tests.faults.healthy.program import Draw, Program
from tests.faults.run import Ended

ENDED = Ended(codes={0: 0}, is_hang=False, wall_s=1.0)


def program() -> Program:
    return next(case for case in load("healthy").values() if isinstance(case, Program) and not case.compiles_differ)


def alarms_of(folder: Path, **changes: Any) -> list[str]:
    """Alarms of a run of two ranks, the second one with some results changed."""
    clean = {"domain": "tp 0-1", "compiles": 2, "findings": [], "stopped_watching": [], "warnings": []}
    for rank, found in enumerate((clean, clean | changes)):
        (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    return alarms(program(), Draw(program="any"), folder, ENDED)


def test_a_run_without_findings_has_no_alarm_whatever_was_logged(tmp_path: Path) -> None:
    assert alarms_of(tmp_path) == []
    assert alarms_of(tmp_path, warnings=["rank 1: the sentinel has stopped watching: this is a text only"]) == []


@pytest.mark.parametrize(
    ("changes", "alarm"),
    [
        ({"stopped_watching": ["the store is lost"]}, "rank 1: the sentinel stopped watching: the store is lost"),
        ({"findings": ["graphs differ"]}, "rank 1: graphs differ"),
        ({"compiles": 3}, "compiles by rank {0: 2, 1: 3}"),
    ],
    ids=["stopped", "finding", "compiles"],
)
def test_a_sentinel_that_stopped_a_finding_and_different_compiles_are_alarms(
    tmp_path: Path, changes: dict[str, Any], alarm: str
) -> None:
    assert alarms_of(tmp_path, **changes) == [alarm]
