"""Communication failed on a rank because a peer aborted: the ranks that live are asked before any is blamed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.evidence.samples import record
from tests.sentinel.test_hang import GROUP, issued, line, state
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import agree_rules
from tpcompile.evidence.records import Check
from tpcompile.evidence.records.causes import Cause
from tpcompile.ranks.recorded import record_side
from tpcompile.sentinel import exception_cause
from tpcompile.sentinel.alarms import Alarms
from tpcompile.sentinel.asking import Asking, Limits
from tpcompile.sentinel.checks import finding_check
from tpcompile.sentinel.events import Absence, RaiseFinding
from tpcompile.sentinel.exited_ranks import lost_to_exited
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import FINISHED, RankState
from tpcompile.sentinel.progress import Progress

HERE = state(1, issued(1), issued(2, at=69), issued(3), issued(4, at=69))
"""It came to line 69 as the rank that aborted there did."""


def finding(
    monkeypatch: pytest.MonkeyPatch,
    *others: RankState,
    here: RankState = HERE,
    at: int = 69,
    failed: Sequence[RankState] = (),
) -> Finding:
    """What rank 1 of three finds that raised at a line, where rank 2 aborted, and the others answer, or have failed."""
    answers = {other.rank: other for other in others}
    dead = Absence("dead", (line(at),), aborted=True)

    def absences(_: Any, ranks: Collection[int]) -> dict[int, Absence]:
        return {rank: dead if rank == 2 else Absence("running") for rank in sorted(ranks)}

    def ask(ranks: Sequence[int], *, timeout_s: float) -> dict[int, RankState]:
        assert timeout_s > 0 and 1 not in ranks, "this rank would wait for its own answer"
        return {rank: answers[rank] for rank in ranks if rank in answers}

    monkeypatch.setattr(exception_cause, "absences", absences)
    said: list[RankState] = []
    log: Any = SimpleNamespace(
        members=(0, 1, 2), rank=1, world_size=3, ask=ask, say_failed=said.append,
        failed=lambda ranks: {one.rank: one for one in failed if one.rank in ranks},
    )  # fmt: skip
    asking = Asking(1, Limits(), Progress(lambda _: None))
    protocol: Any = SimpleNamespace(left={}, asking=asking)
    snapshot: Any = SimpleNamespace(state=lambda: here)
    found = exception_cause.Losses(log, protocol, snapshot).behind(RuntimeError("Connection closed by peer"), line(at))
    assert found is not None
    assert [(one.rank, one.stack) for one in said] == [(1, (line(at),))], "the others can see where this one raised"
    return found


def test_a_rank_that_has_failed_is_compared_though_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It settles an alarm meanwhile; its sizes differ, so the one that communication ended is not to blame."""
    unlike = issued(3).model_copy(update={"sizes": "48x8"})
    found = finding(monkeypatch, failed=[state(0, issued(1), issued(2, at=69), unlike)])
    assert (found.cause, found.ranks, found.is_rank_known) == (Cause.COLLECTIVE_SIZES, (0, 1, 2), False)
    assert "48x8" in found.observed


def test_a_rank_that_lives_and_did_something_else_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding(monkeypatch, state(0, issued(1), issued(2, at=69), issued(3), issued(4, done=False, at=45)))
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (0,), line(45))
    assert found.gone == (2,)


def test_where_all_that_live_did_the_same_the_sizes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding(monkeypatch, HERE.model_copy(update={"rank": 0}))
    assert (found.cause, found.ranks) == (Cause.COLLECTIVE_SIZES, (2,))


def test_a_rank_that_raised_is_compared_where_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both waited in one line for collectives issued before; the main thread has left the program since."""
    here = state(1, issued(1, at=55), issued(2, at=55, done=False), stack=(line(999),))
    found = finding(monkeypatch, here=here, at=57)
    assert (found.cause, found.ranks, found.line) == (Cause.COLLECTIVE_SIZES, (1, 2), line(55))


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_rank_of_another_domain_that_communication_ended_is_found_and_no_other_one(
    monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    """As a stage of one rank, of which nobody else is left to say so; torchrun ends ranks without a fault as well."""

    def absences(_: Any, ranks: Collection[int]) -> dict[int, Absence]:
        dead = Absence("dead", (line(30),), aborted=is_aborted)
        return {rank: dead if rank == 2 else Absence("running") for rank in sorted(ranks)}

    monkeypatch.setattr(exception_cause, "absences", absences)
    monkeypatch.setattr(exception_cause, "_LOSS_S", 0.0)
    log: Any = SimpleNamespace(
        members=(1,), rank=1, world_size=3, ask=lambda ranks, *, timeout_s: {}, say_failed=lambda state: None,
        failed=lambda ranks: {},
    )  # fmt: skip
    protocol: Any = SimpleNamespace(left={}, asking=Asking(1, Limits(), Progress(lambda _: None)))
    here = HERE.model_copy(update={"members": {GROUP: (1,)}})
    snapshot: Any = SimpleNamespace(state=lambda: here)
    error = RuntimeError("Connection closed by peer")
    found = exception_cause.Losses(log, protocol, snapshot).behind(error, line(69))
    if is_aborted:
        assert found is not None
        assert (found.cause, found.line, found.gone) == (Cause.COLLECTIVE_SIZES, line(30), (2,))
    else:
        assert found is None


@pytest.mark.parametrize(
    ("ends_job", "cause", "told"),
    [(True, Cause.STUCK_COLLECTIVE, 1), (False, Cause.STUCK_COLLECTIVE, 0), (True, Cause.KILLED, 0)],
    ids=["stops", "warns", "a loss"],
)
def test_other_domains_are_told_why_this_one_ends_the_job(ends_job: bool, cause: Cause, told: int) -> None:
    """A rank that died is the reason for all of them, and each sees it."""
    said: list[Check] = []
    log: Any = SimpleNamespace(say_problem=said.append, claim=lambda _: True, append=lambda *_, **__: None)
    unused: Any = None
    found = Finding(cause, "each rank waits", (0, 1), line(60))
    Alarms(log, unused, unused, unused, ends_job=ends_job).of_finding(RaiseFinding(found))
    assert len(said) == told


def at_sigterm(
    monkeypatch: pytest.MonkeyPatch, *, theirs_s: float | None, problem: Check | None = None
) -> tuple[Check, tuple[int, ...]] | None:
    """What rank 1 reports on SIGTERM at time 100, where rank 2 is dead and received one at `theirs_s`."""

    def absences(_: Any, ranks: Collection[int]) -> dict[int, Absence]:
        return {rank: Absence("dead" if rank == 2 else "running") for rank in sorted(ranks)}

    monkeypatch.setattr(exception_cause, "absences", absences)
    monkeypatch.setattr(exception_cause, "_LOSS_S", 0.0)
    monkeypatch.setattr(exception_cause.time, "time", lambda: 100.0)
    log: Any = SimpleNamespace(
        members=(0, 1, 2), rank=1, world_size=3, ask=lambda ranks, *, timeout_s: {}, say_terminated=lambda at_s: None,
        terminated_at=lambda rank: theirs_s, first_problem=lambda: problem, say_failed=lambda state: None,
        failed=lambda ranks: {},
    )  # fmt: skip
    protocol: Any = SimpleNamespace(left={}, asking=Asking(1, Limits(), Progress(lambda _: None)))
    return exception_cause.Losses(log, protocol, SimpleNamespace(state=lambda: HERE)).at_sigterm()  # type: ignore[arg-type]


def test_ranks_that_end_at_the_same_sigterm_were_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all ranks when the time of a job is over."""
    assert at_sigterm(monkeypatch, theirs_s=99.95) is None


@pytest.mark.parametrize("theirs_s", [None, 97.0], ids=["killed", "terminated alone"])
def test_a_rank_that_died_before_the_sigterm_is_named(monkeypatch: pytest.MonkeyPatch, theirs_s: float | None) -> None:
    found = at_sigterm(monkeypatch, theirs_s=theirs_s)
    assert found is not None
    assert (found[0].cause, found[0].ranks, found[1]) == (Cause.KILLED, (2,), (2,))


def test_a_problem_that_ends_the_job_in_a_different_domain_explains_the_sigterm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = finding_check(Finding(Cause.STUCK_COLLECTIVE, "rank 5 waits", (5,), line(60)))
    assert at_sigterm(monkeypatch, theirs_s=99.95, problem=problem) == (problem, ())


@pytest.mark.parametrize("has_failed", [False, True])
def test_ranks_that_do_not_report_are_explained_unless_something_else_has_failed(has_failed: bool) -> None:
    """Without a reason, the negative control, the rank is only missing."""
    why = finding_check(Finding(Cause.COLLECTIVE_SIZES, "sizes differ", (0, 1)))
    problems = [why.model_copy(update={"cause": Cause.DTYPE})] if has_failed else []
    causes: list[Cause] = []
    looked: list[Check | None] = []

    def look_for(check: Check | None) -> Callable[[], Check | None]:
        def look() -> Check | None:
            looked.append(check)
            return check

        return look

    for look in (look_for(why), look_for(None)):
        side = record_side(record(0), agree_rules(timeout_s=4.0), problems=problems, why_absent=look)
        verdict = side.judge({0: digest_rank(record(0))}, {1: "its process died"}, lambda *_: None)  # type: ignore[arg-type]
        assert verdict.lead is not None
        causes.append(verdict.lead.cause)
    assert looked == ([] if has_failed else [why, None]), "to look costs the answers of all ranks"
    assert causes == ([Cause.DTYPE] * 2 if has_failed else [Cause.COLLECTIVE_SIZES, Cause.UNKNOWN])


def test_of_a_rank_that_finished_its_end_is_told_once() -> None:
    """One that raised has more to tell: the negative control."""
    told = []
    for ended in (FINISHED, "ValueError: no batch"):
        gone = state(2, issued(1), issued(2, at=69), issued(3)).model_copy(update={"ended": ended})
        found = lost_to_exited({2: gone}, HERE)
        assert found is not None and found.ranks == (2,)
        told.append(f"has left: {ended}" in found.observed)
    assert told == [False, True]
