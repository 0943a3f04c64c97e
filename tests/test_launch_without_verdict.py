"""Status files of ranks that left no verdict -> the verdict of the launcher: which rank ended how, its exit code."""

from __future__ import annotations

import re

import pytest

from tpcompile import launch
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import Status
from tpcompile.evidence.rundir import RankStatus


def status(rank: int, state: str, *, phase: str = "C/first", error: str = "") -> RankStatus:
    """The last word of one of two ranks."""
    return RankStatus(rank=rank, world_size=2, pid=1, host="h", phase=phase, state=state, error=error)


def test_a_rank_that_was_still_running_died_in_its_phase() -> None:
    verdict = launch.verdict_without_one([status(0, "stopped"), status(1, "running")], 2, 1, False)
    assert (verdict.exit_code, verdict.status) == (ExitCode.FAIL, Status.FAIL)
    assert [c.ranks for c in verdict.checks if c.status == Status.FAIL] == [(1,)]


def test_a_process_that_leaves_with_0_in_mid_run_is_the_program_s_doing_and_no_pass() -> None:
    """`os._exit(0)` in a target: nothing was judged."""
    verdict = launch.verdict_without_one([status(0, "running"), status(1, "running")], 2, 0, False)
    assert (verdict.exit_code, verdict.status) == (ExitCode.FAIL, Status.FAIL)
    assert "ranks 0-1" in verdict.summary and "C/first" in verdict.summary


def test_an_exception_is_the_root_cause_before_those_that_died_with_it() -> None:
    statuses = [status(0, "running"), status(1, "failed", error="RuntimeError: boom")]
    verdict = launch.verdict_without_one(statuses, 2, 1, False)
    assert verdict.exit_code == ExitCode.BUG
    assert "rank 1" in verdict.summary and "C/first" in verdict.summary
    assert verdict.checks[0].details == ("RuntimeError: boom",)


def test_a_rank_that_never_started_is_named() -> None:
    verdict = launch.verdict_without_one([status(0, "finished")], 2, 1, False)
    assert "rank 1 never" in verdict.summary
    assert verdict.exit_code == ExitCode.FAIL


def test_at_a_timeout_the_phase_of_every_rank_is_named() -> None:
    verdict = launch.verdict_without_one([status(0, "running", phase="C/steady"), status(1, "running")], 2, -9, True)
    assert verdict.exit_code == ExitCode.TIMEOUT
    assert [check.observed.split()[-1] for check in verdict.checks] == ["C/steady", "C/first"]


@pytest.mark.parametrize(("code", "expected"), [(1, ExitCode.ENVIRONMENT), (0, ExitCode.BUG)])
def test_no_word_from_any_rank_is_the_environment_or_a_bug(code: int, expected: ExitCode) -> None:
    verdict = launch.verdict_without_one([], 2, code, False)
    assert verdict.exit_code == expected
    assert re.search(f"no rank .*code {code}$", verdict.summary)


def test_ranks_that_finished_without_a_verdict_are_our_bug() -> None:
    verdict = launch.verdict_without_one([status(0, "finished"), status(1, "finished")], 2, 0, False)
    assert verdict.exit_code == ExitCode.BUG


@pytest.mark.parametrize("state", ["unwritten", "failed"])
def test_a_record_that_cannot_be_written_is_the_machine_and_not_a_bug(state: str) -> None:
    error = "cannot write run directory x: No space left on device"
    statuses = [status(0, "stopped"), status(1, state, error=error)]
    verdict = launch.verdict_without_one(statuses, 2, 1, False)
    assert verdict.exit_code == (ExitCode.ENVIRONMENT if state == "unwritten" else ExitCode.BUG)
    assert "rank 1" in verdict.summary and error in verdict.summary
