"""A job of 2 x 2 x 2 ranks: stages may differ, a fault is named by its coordinates, whichever domain sees it first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import Ended, torchrun
from tpcompile.evidence.records import Lead, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
TRAIN = Path(__file__).with_name("train.py")


def train(folder: Path, how: str, fault: str) -> tuple[Ended, Verdict]:
    """How the job ended, and the verdict in its run directory."""
    ended = torchrun([TRAIN, how, fault], nproc=8, cwd=folder)
    (path,) = folder.glob("**/verdict.json")
    verdict = RunDir(path.parent).read_verdict()
    assert verdict is not None
    return ended, verdict


def the_lead(folder: Path, how: str, fault: str) -> Lead:
    """The finding of a red job, which all ranks report to their launcher, and one to the user."""
    ended, verdict = train(folder, how, fault)
    assert ended.returncode == 1
    assert verdict.lead is not None
    assert ended.stderr.count("do first") <= 1
    assert "rank raised" not in ended.stderr
    assert ended.left_running == ()
    return verdict.lead


def line_of(fault: str) -> int:
    """The line that is to blame."""
    (number,) = (n for n, line in enumerate(TRAIN.read_text().splitlines(), 1) if f"# fault: {fault}" in line)
    return number


def test_a_healthy_job_is_green_and_its_stages_differ(tmp_path: Path) -> None:
    ended, verdict = train(tmp_path, "check", "none")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "tpcompile" not in ended.stderr
    assert verdict.domains == {f"tp {first}-{first + 1}": ((first, first + 1),) for first in (0, 2, 4, 6)}


def test_a_fault_of_a_stage_is_said_by_its_coordinate(tmp_path: Path) -> None:
    """Both groups of the stage end the job; those of the other stage lose their connections to it."""
    lead = the_lead(tmp_path, "sentinel", "stage")
    assert (lead.cause, lead.ranks) == (Cause.RANK_CONSTANT, (4, 5, 6, 7))
    assert lead.place.endswith("with pp = 1")
    assert lead.line is not None
    assert lead.line.line == line_of("stage")


def test_one_rank_that_recompiles_is_named_by_its_coordinates(tmp_path: Path) -> None:
    lead = the_lead(tmp_path, "check", "late")
    assert (lead.cause, lead.ranks, lead.place) == (Cause.SHAPE, (1,), "at pp 0, dp 0, tp 1")


def test_one_rank_of_a_group_of_two_is_named_by_what_the_other_groups_compiled(tmp_path: Path) -> None:
    lead = the_lead(tmp_path, "after", "rank")
    assert (lead.ranks, lead.is_rank_known, lead.place) == ((5,), True, "at pp 1, dp 0, tp 1")
    assert lead.line is not None
    assert lead.line.line == line_of("rank")
