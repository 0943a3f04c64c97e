"""States of all ranks when the run ends early -> the rank to blame, in place of the one that waits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gate.runs import AOT, GateRun, run_gate
from tests.sentinel.test_hang import GROUP, issued, line, state
from tpcompile.errors import ExitCode
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records import Check, CheckId, Status, UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.gate.stuck import explained, is_of_wait
from tpcompile.recording.flow import IS_POSSIBLE
from tpcompile.sentinel.messages import FINISHED, RankState
from tpcompile.sentinel.situation import Lost

LATE = "1 late"
pytestmark = pytest.mark.long


def check(id: CheckId = CheckId.TIMED_OUT, cause: Cause = Cause.UNKNOWN, ranks: tuple[int, ...] = ()) -> Check:
    return Check(id=id, mode="target", status=Status.FAIL, expected="", observed="", cause=cause, ranks=ranks)


def why(problem: Check, *states: RankState, lost: Lost | None = None) -> tuple[Check, ...]:
    return explained(problem, ByRank({one.rank: one for one in states}), {lost.rank: lost} if lost else {}, {})


def waiting(rank: int, seq: int = 2, **more: object) -> RankState:
    """A rank that has waited for 4 s."""
    return state(rank, issued(1), issued(seq, done=False), **more)


def finished(rank: int) -> RankState:
    """A rank that has left out the second collective."""
    return state(rank, issued(1), ended=FINISHED, phase="target/first", stack=())


@pytest.mark.parametrize(
    "problem",
    [check(CheckId.TIMED_OUT), check(CheckId.MOVING), check(CheckId.NO_ERROR, Cause.COMMUNICATION)],
)
def test_a_rank_that_the_others_wait_for_is_named_with_its_own_line(problem: Check) -> None:
    cause, consequence = why(problem, waiting(0), state(1, issued(1)))
    assert (cause.cause, cause.ranks, cause.line) == (Cause.NEVER_ARRIVED, (1,), line(21))
    assert re.search("rank 0 waits .*all_reduce #2", cause.observed) and cause.mode == "target"
    assert (consequence.id, consequence.is_consequence) == (problem.id, True)


def test_no_rank_is_named_where_none_has_waited_long() -> None:
    """In a phase that is only slow, each collective waits for the last rank."""
    now = issued(2, done=False).model_copy(update={"age_s": 0.5})
    (only,) = why(check(), state(0, issued(1), now), state(1, issued(1)))
    assert (only.cause, only.is_consequence) == (Cause.UNKNOWN, False)


def test_a_rank_that_waits_itself_is_not_the_one_that_is_late() -> None:
    last = issued(1, done=False, group=LATE, at=11)
    between = state(1, issued(1), last, groups=(GROUP, LATE), members={LATE: (1, 2)})
    cause, _ = why(check(), waiting(0), between, state(2, groups=(LATE,), members={LATE: (1, 2)}))
    assert cause.ranks == (2,)


def test_a_rank_that_has_finished_the_phase_left_out_the_collective() -> None:
    """The check names the rank that did not arrive, since it waits in that collective."""
    cause, consequence = why(check(CheckId.ARRIVED, ranks=(0,)), waiting(0), finished(1))
    assert (cause.cause, cause.ranks, cause.line) == (Cause.STUCK_COLLECTIVE, (1,), line(10))
    assert cause.observed.endswith(f"rank 1 {finished(1).how_it_ended}")
    assert consequence.is_consequence


@pytest.mark.parametrize(
    ("other", "at"),
    [(state(1, ended=FINISHED, phase="target/first", stack=()), line(20)), (state(1), line(21))],
    ids=["finished", "in its own code"],
)
def test_a_rank_that_sets_up_its_first_collective_waits(other: RankState, at: UserLine) -> None:
    """On NCCL it waits for the communicator, and the flight recorder has nothing yet."""
    cause, consequence = why(check(CheckId.ARRIVED, ranks=(0,)), state(0, calling=GROUP), other)
    assert (cause.ranks, cause.line, consequence.is_consequence) == ((1,), at, True)
    assert re.search(f"rank 0 waits .*{GROUP!r} at {line(20)}", cause.observed)


def test_ranks_that_set_up_the_same_collective_wait_for_nobody() -> None:
    (only,) = why(check(), state(0, calling=GROUP), state(1, calling=GROUP))
    assert not only.is_consequence


def test_in_compiled_code_it_made_fewer_calls() -> None:
    in_a_call = issued(2, done=False).model_copy(update={"call_line": line(7), "stack": (line(10), line(7))})
    cause, _ = why(check(CheckId.ARRIVED, ranks=(0,)), state(0, issued(1), in_a_call), finished(1))
    assert (cause.cause, cause.ranks, cause.line) == (Cause.CALL_COUNT, (1,), line(7))
    assert f"rank 1 {finished(1).how_it_ended}" in cause.observed


def test_a_rank_that_did_not_arrive_and_waits_for_none_is_named_where_it_is() -> None:
    (only,) = why(check(CheckId.ARRIVED, ranks=(1,)), finished(0), state(1, issued(1)))
    assert (only.ranks, only.line, only.is_consequence) == ((1,), line(21), False)


def test_a_rank_that_did_not_arrive_and_does_not_answer_has_no_line() -> None:
    (only,) = why(check(CheckId.ARRIVED, ranks=(1,)), finished(0))
    assert (only.ranks, only.line) == ((1,), None)


def test_a_rank_that_aborted_is_compared_with_those_that_remain() -> None:
    """Also where a remaining rank only saw that the connection was closed."""
    gone = Lost(1, "died", stack=(line(30),), aborted=True, is_final=True)
    for problem in (check(CheckId.ALIVE, ranks=(1,)), check(CheckId.NO_ERROR, Cause.COMMUNICATION, (0,))):
        cause, consequence = why(problem, waiting(0), lost=gone)
        assert re.search("rank 1 .*died .*/home/me/train.py:30", cause.observed) and "all_reduce #2" in cause.observed
        assert consequence.is_consequence


@pytest.mark.parametrize("how", ["killed", "stopped by the launcher"])
def test_of_a_rank_that_was_killed_or_stopped_nothing_more_is_known(how: str) -> None:
    problem = check(CheckId.ALIVE, ranks=(1,))
    if how == "killed":
        found = why(problem, waiting(0), lost=Lost(1, "died", is_final=True))
    else:
        found = why(problem, waiting(0), state(1, issued(1)))
    assert found == (problem,)


def test_only_a_wait_and_failed_communication_have_their_cause_on_a_different_rank() -> None:
    assert is_of_wait(check(CheckId.ALIVE)) and is_of_wait(check(CheckId.NO_ERROR, Cause.COMMUNICATION))
    assert not is_of_wait(check(CheckId.NO_ERROR)) and not is_of_wait(check(CheckId.AGREED))


def gate(run_dir: Path, how: str, *settings: str) -> GateRun:
    sets = [part for one in (AOT[0], f"how={how}", *settings) for part in ("--set", one)]
    return run_gate(run_dir, "--target", "tests.gate.stuck:step", *sets)


LIVE = {
    "sleeps": (Cause.NEVER_ARRIVED, "sleeps", "may sleep"),
    "leaves out": (Cause.STUCK_COLLECTIVE, "summed", "may leave out"),
    "leaves out the last": (Cause.STUCK_COLLECTIVE, "summed", "may leave out"),
    "aborts": (Cause.STUCK_COLLECTIVE, "summed", "may leave out"),
    "aborts in the next call": (Cause.EXTRA_COLLECTIVE, "larger", "may repeat"),
}
"""What rank 1 does -> cause, the line to blame, and the branch before it. In the last two gloo aborts rank 0."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", LIVE)
def test_on_ranks_the_guilty_one_leads(how: str, tmp_path: Path) -> None:
    """With Python 3.12 the executed lines are known: the branch leads, and the cause is its consequence."""
    cause, mark, branch = LIVE[how]
    run = gate(tmp_path / "run", how, "gate.store_timeout_s=6")
    lead = run.judged.lead
    assert lead is not None and run.exit_code == ExitCode.FAIL
    is_known = not IS_POSSIBLE or cause is Cause.NEVER_ARRIVED  # of two that parted nobody is blamed by a past
    expected = (Cause.PARTED if IS_POSSIBLE else cause, (1,) if is_known else (0, 1))
    assert (lead.cause, lead.ranks) == expected, run.judged.summary
    assert lead.consequence.startswith(cause.value if IS_POSSIBLE else "")
    assert lead.line is not None and lead.line.code.endswith(f"# {branch if IS_POSSIBLE else mark}"), run.judged.summary
    assert any(one.is_consequence for one in run.judged.checks), "what the waiting rank saw is in the report"


@pytest.mark.timeout(120)
def test_the_end_of_a_phase_names_it_before_the_collective_times_out(tmp_path: Path) -> None:
    """The rank that waits would raise gloo's exception at the same time."""
    run = gate(tmp_path / "run", "sleeps", "gate.phase_timeout_s=6")
    assert run.judged.exit_code == ExitCode.TIMEOUT
    assert run.judged.lead is not None and run.judged.lead.ranks == (1,)
    failed = {one.id for one in run.failed().values()}
    assert failed - {CheckId.SAME_BRANCHES} == {CheckId.MOVING, CheckId.TIMED_OUT}
