"""Digests and divergences -> verdict and exit code, live and again from the run directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.evidence.samples import call, compiled, guard, record, reduce
from tests.gate.test_checks import CONFIG, counters, errors, facts, healthy
from tpcompile.config import RunConfig, load
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import Absent, Rules, conclude, fetch_from
from tpcompile.evidence.records import (
    Check,
    CheckId,
    DivergenceClass,
    GraphBreak,
    RankRecord,
    Status,
    UserLine,
    Verdict,
)
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RankStatus, RunDir
from tpcompile.gate.replay import gate_rules, replay

ONLY_C = load("cpu_smoke", train=True)
WRONG = "it went wrong"
"""What a check observed that failed before the comparison."""


def verdict(*records: RankRecord, config: RunConfig = ONLY_C, world_size: int = 2, **fields) -> Verdict:
    """What is concluded from these ranks."""
    digests = [digest_rank(r) for r in records]
    return conclude(gate_rules(config), digests, fetch_from(records), world_size=world_size, **fields)


def odd(rank: int = 1) -> RankRecord:
    """A rank whose program multiplies by a different number."""
    return healthy(rank, compiles=[compiled(call("mul", "%0", "9", at=12))])


def plain(rank: int = 0) -> RankRecord:
    """A healthy rank without lowered layers."""
    return healthy(rank, compiles=[compiled(call("mul", "%0", "2", at=12))])


def problem(id: CheckId) -> Check:
    """A check that already failed on the way."""
    return Check(id=id, mode="C", status=Status.FAIL, expected="-", observed=WRONG, ranks=(1,))


def test_a_healthy_run_is_green_and_says_what_was_proved() -> None:
    found = verdict(healthy(0), healthy(1))
    assert (found.status, found.exit_code) == (Status.PASS, ExitCode.PASS)
    assert "2" in found.summary and "agree" in found.summary
    assert (found.domains, found.divergences) == ({"tp": ((0, 1),)}, ())


def test_modes_are_judged_in_the_order_they_ran() -> None:
    found = verdict(healthy(0), healthy(1), config=CONFIG)
    assert list(dict.fromkeys(c.mode for c in found.checks)) == ["A", "B", "C"]
    assert found.exit_code == ExitCode.PASS


def test_a_divergence_is_red_and_the_summary_names_ranks_and_line() -> None:
    found = verdict(plain(0), odd(1))
    assert (found.status, found.exit_code) == (Status.FAIL, ExitCode.FAIL)
    assert found.lead is not None and found.lead.line is not None
    assert (found.lead.cause, found.lead.ranks, found.lead.line.line) == (Cause.RANK_CONSTANT, (0, 1), 12)
    assert all(part in found.summary for part in ("mul(%0, 9)", "ranks 0-1", "/app/model.py:12"))
    assert found.domains == {"tp": ((0,), (1,))}


def test_a_failed_compile_is_reported_by_its_exception_not_as_a_difference_from_ranks_that_it_stopped() -> None:
    """The other rank was in the same compile; where something else ended the run, the difference stays."""
    failed = healthy(1, compiles=[compiled(call("mul", "%0", "2", at=12), failure="no backward")])
    found = verdict(plain(0), failed, problems=[problem(CheckId.NO_ERROR)])
    assert [check.id for check in found.checks if check.is_red] == [CheckId.NO_ERROR]
    on_rank_0 = problem(CheckId.NO_ERROR).model_copy(update={"ranks": (0,)})
    for otherwise in (problem(CheckId.TIMED_OUT), on_rank_0):
        found = verdict(plain(0), failed, problems=[otherwise])
        assert [divergence.cause for divergence in found.divergences] == [Cause.COMPILE_FAILED]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_compile_of_a_frame_that_no_other_rank_compiles_is_red_unless_its_exception_is_reported(
    rank: int,
) -> None:
    """A frame without a counterpart is shown by its first node, not by its failure."""
    alone = compiled(call("mul", "%0", "2", at=40), failure="no backward", compile_id="1/0")
    failed = healthy(rank, compiles=[*plain().compiles, alone])
    raised = problem(CheckId.NO_ERROR).model_copy(update={"ranks": (rank,)})
    causes = []
    for problems in ([], [raised]):
        found = verdict(*sorted([plain(1 - rank), failed], key=lambda record: record.rank), problems=problems)
        causes.append([divergence.cause for divergence in found.divergences])
    assert causes == [[Cause.COMPILE_FAILED], []]


def test_a_graph_break_on_one_rank_explains_the_collectives_that_it_did_not_compile() -> None:
    line = UserLine(file="/app/model.py", line=13, function="forward")
    broken = healthy(
        1, compiles=[compiled(call("mul", "%0", "2", at=12), breaks=(GraphBreak(reason="print", line=line),))]
    )
    for live in (problem(CheckId.AGREED), problem(CheckId.TIMED_OUT)):
        found = verdict(plain(0), broken, problems=[live])
        assert found.lead is not None
        assert (found.lead.cause == Cause.GRAPH_BREAK) == (live.id == CheckId.AGREED)
    without = verdict(plain(0), odd(1), problems=[problem(CheckId.AGREED)])
    assert without.summary.startswith(CheckId.AGREED.text)


@pytest.mark.parametrize(
    ("cause", "follows"),
    [(Cause.GRAPH_BREAK, {CheckId.GRAPHS, CheckId.ONE_REGION, CheckId.ENTERED}), (Cause.COMPILE_DISABLED, set())],
)
def test_more_graphs_and_regions_follow_from_a_graph_break_and_from_nothing_else(
    cause: Cause, follows: set[CheckId]
) -> None:
    ids = (CheckId.UNBROKEN, CheckId.GRAPHS, CheckId.ONE_REGION, CheckId.ENTERED, CheckId.STEADY)
    failed = [Check(id=one, status=Status.FAIL, expected="1", observed="2", cause=cause) for one in ids]
    rules = Rules(lambda *_: failed, timeout_s=1.0)
    found = conclude(rules, [], fetch_from([]), world_size=2)
    assert found.lead is not None and found.lead.cause is cause
    assert {check.id for check in found.checks if check.is_consequence} == follows


def test_collectives_that_differ_before_they_run_follow_from_any_other_cause_that_was_found() -> None:
    """As from a flag that one rank reads differently, which its guard shows."""
    (found,) = verdict(plain(0), odd(1)).divergences
    for cause, is_consequence in ((Cause.EXTRA_COLLECTIVE, True), (found.cause, False), (Cause.UNKNOWN, False)):
        live = problem(CheckId.AGREED).model_copy(update={"cause": cause})
        judged = verdict(plain(0), odd(1), problems=[live])
        assert [check.is_consequence for check in judged.checks if check.id == CheckId.AGREED] == [is_consequence]
        assert judged.lead is not None
        assert (judged.lead.says in found.title) == is_consequence
    alone = verdict(plain(0), plain(1), problems=[live.model_copy(update={"cause": Cause.EXTRA_COLLECTIVE})])
    assert not any(check.is_consequence for check in alone.checks)


def test_what_differs_in_one_domain_explains_no_collectives_of_a_different_one() -> None:
    live = problem(CheckId.AGREED).model_copy(update={"cause": Cause.EXTRA_COLLECTIVE})
    records = [plain(0), odd(1), *(plain(rank).model_copy(update={"domain": "tp of stage 1"}) for rank in (2, 3))]
    for ranks, is_consequence in (((1,), True), ((3,), False)):
        judged = verdict(*records, problems=[live.model_copy(update={"ranks": ranks})])
        assert [check.is_consequence for check in judged.checks if check.id == CheckId.AGREED] == [is_consequence]


@pytest.mark.parametrize(
    ("id", "cause"),
    [
        (CheckId.NO_ERROR, Cause.COMMUNICATION),
        (CheckId.TIMED_OUT, Cause.UNKNOWN),
        (CheckId.ARRIVED, Cause.UNKNOWN),
        (CheckId.MOVING, Cause.NEVER_ARRIVED),
    ],
)
def test_collectives_that_differ_in_compiled_code_explain_why_they_failed_or_did_not_end(
    id: CheckId, cause: Cause
) -> None:
    """Not an exception of the user's program, not a difference without collectives, and not code of one rank alone."""
    live = problem(id).model_copy(update={"cause": cause})
    reducing = [healthy(rank, compiles=[compiled(reduce(op=op))]) for rank, op in enumerate(("sum", "max"))]
    judged = verdict(*reducing, problems=[live])
    assert judged.lead is not None and judged.lead.cause == Cause.REDUCE_OP
    assert judged.exit_code == (ExitCode.TIMEOUT if id == CheckId.TIMED_OUT else ExitCode.FAIL)
    alone = [reducing[0], healthy(1, compiles=[])]
    for records, otherwise in ((reducing, problem(CheckId.NO_ERROR)), ([plain(0), odd(1)], live), (alone, live)):
        lead = verdict(*records, problems=[otherwise]).lead
        assert lead is not None and WRONG in lead.says


def test_a_program_that_only_one_rank_has_explains_that_it_did_not_compile_there() -> None:
    """Where the rank is the odd one, and the compiler raised; not where the program itself raised."""
    raised = problem(CheckId.NO_ERROR).model_copy(update={"cause": Cause.COMPILE_FAILED})
    judged = verdict(plain(0), odd(1), problems=[raised])
    assert judged.lead is not None and "mul(%0, 2) / mul(%0, 9)" in judged.lead.says
    for otherwise in ({"ranks": (0,)}, {"cause": Cause.UNKNOWN}):
        judged = verdict(plain(0), odd(1), problems=[raised.model_copy(update=otherwise)])
        assert judged.lead is not None and WRONG in judged.lead.says


def test_an_environment_that_differs_explains_collectives_that_a_rank_did_not_compile() -> None:
    setting = (("config _dynamo.config.disable", "True"),)
    missing = problem(CheckId.AGREED)
    judged = verdict(plain(0), plain(1).model_copy(update={"environment": setting}), problems=[missing])
    assert judged.lead is not None and judged.lead.cause == Cause.ENVIRONMENT
    judged = verdict(plain(0), plain(1), problems=[missing])
    assert judged.lead is not None and WRONG in judged.lead.says


def test_a_check_that_fails_alone_is_the_summary() -> None:
    wrong = healthy(1, facts=facts(errors=errors(forward=99.0)))
    found = verdict(healthy(0), wrong)
    assert found.lead is not None and found.lead.ranks == (1,)
    assert (found.exit_code, "99.00x" in found.summary) == (ExitCode.FAIL, True)


def test_a_divergence_explains_the_wrong_number_behind_it() -> None:
    wrong = odd(1).model_copy(update={"facts": facts(errors=errors(forward=99.0))})
    assert "mul(%0, 2) / mul(%0, 9)" in verdict(plain(0), wrong).summary


def test_wrong_numbers_come_before_guards_that_differ_under_equal_programs() -> None:
    records = [healthy(rank, compiles=[compiled(guards=(guard(says=f"== {rank}"),))]) for rank in range(2)]
    assert verdict(*records).summary.startswith(Cause.GUARD_ONLY.value)
    wrong = [record.model_copy(update={"facts": facts(errors=errors(forward=99.0))}) for record in records]
    assert "99.00x" in verdict(*wrong).summary


def test_what_ended_the_run_explains_the_divergence() -> None:
    found = verdict(plain(0), odd(1), problems=[problem(CheckId.NO_ERROR)])
    assert found.lead is not None and WRONG in found.lead.says
    assert (found.lead.cause, found.lead.ranks) == (Cause.UNKNOWN, (1,))


def test_an_absent_rank_is_a_finding_with_its_number_and_its_last_word() -> None:
    seen = "in phase C/first"
    found = verdict(healthy(0), absent=[Absent(1, seen)])
    assert found.exit_code == ExitCode.FAIL
    check = next(c for c in found.checks if c.id == CheckId.REPORTED)
    assert check.ranks == (1,) and seen in check.observed and "rank 1" in found.summary


def idle(rank: int) -> RankRecord:
    """A rank on which nothing was compiled."""
    return healthy(rank, compiles=[], counters=(counters("C/first", frames=0, graphs=0),))


def test_nothing_compiled_has_its_own_exit_code_and_cause() -> None:
    found = verdict(idle(0), idle(1))
    assert found.exit_code == ExitCode.NOTHING_COMPILED
    assert found.lead is not None and found.lead.cause == Cause.NOTHING_COMPILED


def test_a_timeout_has_its_own_exit_code() -> None:
    assert verdict(idle(0), idle(1), problems=[problem(CheckId.TIMED_OUT)]).exit_code == ExitCode.TIMEOUT


def test_a_declared_difference_is_green_and_in_the_verdict() -> None:
    reason = "scale is per rank on purpose"
    config = load("cpu_smoke", [f"gate.allow=[{{layer: guards, contains: scale, reason: {reason}}}]"], train=True)
    other = healthy(1, compiles=[compiled(call("mul", "%0", "2", at=12), guards=(guard(says="== 2"),))])
    found = verdict(plain(0), other, config=config)
    assert found.exit_code == ExitCode.PASS
    assert [(d.cls, reason in d.advice) for d in found.divergences] == [(DivergenceClass.DECLARED, True)]
    assert verdict(plain(0), other).exit_code == ExitCode.FAIL


def test_a_verdict_survives_json() -> None:
    found = verdict(plain(0), odd(1))
    assert Verdict.model_validate_json(found.to_json()) == found


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory with the configuration of a mode C run."""
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.write_config(ONLY_C.model_dump_json())
    return run_dir


@pytest.mark.parametrize("records", [[healthy(0), healthy(1)], [plain(0), odd(1)]], ids=["green", "red"])
def test_a_replay_gives_the_verdict_of_the_live_run(run: RunDir, records: list[RankRecord]) -> None:
    for found in records:
        run.write_record(found)
    assert replay(run) == verdict(*records)


def test_a_replay_keeps_what_only_the_live_run_could_see(run: RunDir) -> None:
    live = verdict(plain(0), plain(1), problems=[problem(CheckId.AGREED)])
    run.write_record(plain(0))
    run.write_record(plain(1))
    run.write_verdict(live)
    assert replay(run) == live


def test_a_replay_names_the_rank_that_left_no_record_and_its_last_phase(run: RunDir) -> None:
    run.write_record(healthy(0))
    run.write_status(RankStatus(rank=1, world_size=2, pid=1, host="h", phase="C/first", state="running"))
    check = next(c for c in replay(run).checks if c.id == CheckId.REPORTED)
    assert check.ranks == (1,) and "C/first" in check.observed


def test_a_replay_says_of_a_dead_rank_what_the_live_run_saw_of_its_process(run: RunDir) -> None:
    run.write_record(plain(0))
    died = problem(CheckId.ALIVE).model_copy(update={"observed": "rank 1 has died", "ranks": (1,)})
    live = verdict(plain(0), problems=[died])
    run.write_verdict(live)
    again = replay(run)
    assert [check.id for check in again.checks if check.is_red][:1] == [CheckId.ALIVE]
    assert (again.summary, again.checks) == (live.summary, live.checks)


def test_a_replay_keeps_where_the_live_run_saw_a_missing_rank_last(run: RunDir) -> None:
    run.write_record(plain(0))
    live = verdict(plain(0), absent=[Absent(1, "compiling in phase C/first; its process 7 died")])
    run.write_verdict(live)
    assert replay(run) == live


def test_a_record_that_was_lost_after_a_green_run_is_still_missing(run: RunDir) -> None:
    run.write_record(plain(0))
    run.write_verdict(verdict(plain(0), plain(1)))
    missing = [check.ranks for check in replay(run).checks if check.id == CheckId.REPORTED]
    assert missing == [(1,)]


def test_a_replay_without_records_says_so(run: RunDir) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(run.path))):
        replay(run)


def test_records_keep_every_field_through_the_run_directory(run: RunDir) -> None:
    found = record(0, *healthy(0).compiles, environment=(("torch", "2.13"),), groups=(("0", "tp"),), facts={"a": 1.5})
    run.write_record(found)
    assert run.read_records() == [found]


def test_ranks_of_several_hosts_are_named_with_them() -> None:
    hosts = ("node-a", "node-a", "node-b")
    ranks = [plain(0), plain(1), odd(2)]
    placed = [one.model_copy(update={"host": host}) for one, host in zip(ranks, hosts, strict=True)]
    found = verdict(*placed, world_size=4, absent=[Absent(3, "never", "node-b")])
    assert found.hosts == {"node-a": (0, 1), "node-b": (2, 3)}
    assert found.lead is not None
    assert found.lead.hosts == found.hosts
    assert "(node-b)" in found.summary


def test_a_job_on_one_host_names_none() -> None:
    ranks = [one.model_copy(update={"host": "node-a"}) for one in (plain(0), plain(1), odd(2))]
    found = verdict(*ranks, world_size=3)
    assert found.hosts == {}
    assert "node-a" not in found.summary
