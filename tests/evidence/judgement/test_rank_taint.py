"""Taints from records by hand: values decide before names, the allow-list shows its reason, the switch turns red."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from rich.console import Console

from tests.evidence.samples import call, compiled, guard, line, record, reduce
from tpcompile.config import load
from tpcompile.errors import ConfigError
from tpcompile.evidence.comparison.compare import Allowed
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.rank_taint import find_taints
from tpcompile.evidence.judgement.verdict import Rules, conclude, fetch_from
from tpcompile.evidence.records import (
    CheckId,
    CompileRecord,
    Grade,
    Guard,
    RankRead,
    RankRecord,
    Status,
    Taint,
    TaintKind,
    UserLine,
    Verdict,
)
from tpcompile.gate.replay import gate_rules
from tpcompile.report import findings, terminal

AT = UserLine(file="/app/model.py", line=12, function="forward", code="if dist.get_rank() == 0:")
REASON = "only rank 0 logs, outside of the graph"


def read(**fields: Any) -> RankRead:
    """`dist.get_rank()` on a line every trace comes to."""
    values = {"kind": TaintKind.RANK, "text": "dist.get_rank()", "line": AT, "is_sure": True} | fields
    return RankRead(**values)


def seen(*reads: RankRead, guards: Sequence[Guard] = (), factor: str = "2") -> CompileRecord:
    """A compile whose traced code was looked at."""
    return compiled(call("mul", "%0", factor), reduce("%1"), rank_reads=reads, guards=(guard(), *guards))


def on(source: str, says: object, at: int = 7) -> Guard:
    """An equality guard."""
    return guard("EQUALS_MATCH", source, f"== {says}", at)


def found(*records: RankRecord, allowed: Allowed = ()) -> tuple[Taint, ...]:
    """Taints over these ranks."""
    return find_taints([digest_rank(r) for r in records], fetch_from(records), allowed=allowed)


def test_two_guards_that_names_are_one_object_are_not_one_value_that_differs() -> None:
    def alias(left: str, right: str) -> Guard:
        return Guard(
            type="LAMBDA_GUARD", source="", expression=f"G['{left}'].torch is G['{right}'].torch", line=line(7)
        )

    here = seen(guards=(alias("module", "sdpa"),), factor="2")
    there = seen(guards=(alias("module", "llama"),), factor="x")
    assert [taint.text for taint in found(*ranks(here, there)) if taint.what == "guard"] == []


def ranks(*compiles: CompileRecord) -> list[RankRecord]:
    """One rank per compile."""
    return [record(r, c, world_size=len(compiles)) for r, c in enumerate(compiles)]


def test_equal_programs_without_reads_have_no_taint() -> None:
    assert found(*ranks(seen(), seen())) == ()


@pytest.mark.parametrize(
    ("values", "places", "kind"),
    [
        ([0, 1, 2, 3], [{}] * 4, TaintKind.RANK),
        ([0, 1, 0, 1], [{"local rank": n} for n in (0, 1, 0, 1)], TaintKind.LOCAL_RANK),
        ([2, 3, 2, 3], [{"device index": n} for n in (2, 3, 2, 3)], TaintKind.DEVICE_INDEX),
        ([1, 0, 3, 2], [{}] * 4, TaintKind.DIFFERS),
        ([5, 5, 5, 7], [{}] * 4, TaintKind.DIFFERS),
    ],
)
def test_a_guard_that_differs_is_named_by_what_its_values_are(
    values: list[int], places: list[dict[str, int]], kind: TaintKind
) -> None:
    records = [
        record(r, seen(guards=[on("L['self'].k", v)]), world_size=4, places=place)
        for r, (v, place) in enumerate(zip(values, places, strict=True))
    ]
    (taint,) = found(*records)
    assert (taint.what, taint.kind, taint.grade) == ("guard", kind, Grade.CERTAIN)
    assert taint.line is not None and taint.line.line == 7


def test_a_guard_equal_to_the_place_in_the_group_is_named_so() -> None:
    records = [record(r, seen(guards=[on("L['self'].k", r - 4)]), world_size=8, coordinate=r - 4) for r in range(4, 8)]
    assert [t.kind for t in found(*records)] == [TaintKind.GROUP_RANK]


def test_ranks_with_one_value_share_a_group() -> None:
    (taint,) = found(*ranks(*(seen(guards=[on("G['k']", r == 3)]) for r in range(4))))
    assert [g.ranks for g in taint.groups] == [(0, 1, 2), (3,)]


@pytest.mark.parametrize("source", ["L['self'].lora.rank", "L['self'].batch"])
@pytest.mark.parametrize("value", [16, 4])
def test_a_number_that_is_equal_on_all_ranks_and_no_rank_is_not_listed(source: str, value: int) -> None:
    assert found(*ranks(*(seen(guards=[on(source, value)]) for _ in range(2)))) == ()


def test_a_size_that_happens_to_be_one_rank_is_not_listed() -> None:
    assert found(*ranks(*(seen(guards=[on("L['self'].batch", 1)]) for _ in range(2)))) == ()


@pytest.mark.parametrize("source", ["G['local_rank']", "L['self'].tp_rank", "L['self'].rank", "L['args'].device_index"])
def test_a_ranks_name_with_a_value_that_some_rank_has_is_possible_at_most(source: str) -> None:
    (taint,) = found(*ranks(*(seen(guards=[on(source, 0)]) for _ in range(2))))
    assert (taint.grade, taint.what) == (Grade.POSSIBLE, "guard")


def test_a_range_on_a_ranks_name_is_possible() -> None:
    bound = Guard(type="LAMBDA_GUARD", source="G['local_rank']", expression="G['local_rank'] < 8", line=line(9))
    assert [t.grade for t in found(*ranks(seen(guards=[bound]), seen(guards=[bound])))] == [Grade.POSSIBLE]


def test_a_tensor_named_rank_is_not_listed() -> None:
    tensor = Guard(type="TENSOR_MATCH", source="L['self'].rank", expression="check_tensor(L['self'].rank)")
    assert found(*ranks(seen(guards=[tensor]), seen(guards=[tensor]))) == ()


def test_a_constant_is_listed_once_with_the_read_that_made_it() -> None:
    made_by = read(line=line(3))
    (taint,) = found(*ranks(seen(made_by, factor="1"), seen(made_by, factor="2")))
    assert (taint.what, taint.kind) == ("constant", TaintKind.RANK)
    assert "mul(%0, 1) / mul(%0, 2)" in taint.text and "dist.get_rank()" in taint.text


def test_a_different_op_on_one_rank_is_left_to_the_graph_layer() -> None:
    other = compiled(call("cos", "%0"), reduce("%1"), rank_reads=())
    assert found(*ranks(seen(), other)) == ()


def test_a_read_on_a_path_not_every_trace_takes_is_likely() -> None:
    maybe = read(is_sure=False)
    assert [t.grade for t in found(*ranks(seen(maybe), seen(maybe)))] == [Grade.LIKELY]


@pytest.mark.parametrize(
    ("shown", "grade"),
    [
        (Guard(type="ID_MATCH", source="L['self'].group", expression="type=<...ProcessGroup object>"), Grade.CERTAIN),
        (Guard(type="ID_MATCH", source="L['self'].group", expression="type=<class 'app.Team'>"), Grade.LIKELY),
    ],
)
def test_a_method_named_rank_is_certain_only_on_what_a_guard_shows_to_be_a_group(shown: Guard, grade: Grade) -> None:
    unknown = read(kind=TaintKind.GROUP_RANK, text="self.group.rank()", receiver="self.group")
    assert [t.grade for t in found(*ranks(*(seen(unknown, guards=[shown]) for _ in range(2))))] == [grade]


@pytest.mark.parametrize(
    ("variable", "values", "grades"),
    [
        ("SEED", ("1", "2"), [Grade.CERTAIN]),
        ("SEED", ("1", "1"), []),
        ("LOCAL_RANK", ("0", "1"), [Grade.CERTAIN]),
        ("LOCAL_RANK", ("0", "0"), [Grade.LIKELY]),
    ],
)
def test_a_variable_is_listed_when_it_differs_or_is_a_rank_by_nature(
    variable: str, values: tuple[str, str], grades: list[Grade]
) -> None:
    reads = [
        read(kind=TaintKind.ENVIRONMENT, text=f"os.environ['{variable}']", variable=variable, value=v) for v in values
    ]
    assert [t.grade for t in found(*ranks(*(seen(r) for r in reads)))] == grades


def test_one_line_read_in_two_compiles_is_listed_once() -> None:
    two = [seen(read()), seen(read()).model_copy(update={"phase": "C/resized", "compile_id": "0/1"})]
    assert len(found(record(0, *two), record(1, *two))) == 1


def test_a_constant_of_one_line_in_two_compiles_is_listed_once() -> None:
    def twice(factor: str) -> list[CompileRecord]:
        other = compiled(call("cos", "%0"), call("mul", "%1", factor), phase="C/resized", rank_reads=())
        return [seen(factor=factor), other]

    assert len(found(record(0, *twice("5")), record(1, *twice("8")))) == 1


@pytest.mark.parametrize("contains", ["dist.get_rank()", "model.py:12", "if dist.get_rank() == 0"])
def test_an_allowed_taint_keeps_its_place_and_gets_its_reason(contains: str) -> None:
    tainted = ranks(seen(read()), seen(read()))
    assert [t.reason for t in found(*tainted, allowed=[("taint", contains, REASON)])] == [REASON]
    assert [t.reason for t in found(*tainted, allowed=[("guards", contains, REASON)])] == [""]


def test_an_allowed_guard_difference_is_an_allowed_taint() -> None:
    differing = ranks(*(seen(guards=[on("L['self'].k", r)]) for r in range(2)))
    assert [t.reason for t in found(*differing, allowed=[("guards", "L['self'].k", REASON)])] == [REASON]


def judged(*records: RankRecord, taint: Literal["list", "fail"], allowed: Allowed = ()) -> Verdict:
    """Verdict of a run of which nothing else is asked."""
    rules = Rules(lambda digests, divergences: [], 1.0, allowed, modes=("C",), taint=taint)
    digests = [digest_rank(r) for r in records]
    return conclude(rules, digests, fetch_from(records), world_size=len(records))


def printed(verdict: Verdict) -> str:
    """The whole terminal report."""
    console = Console(width=220, record=True, file=io.StringIO())
    terminal.render(verdict, console)
    return console.export_text()


def test_a_taint_is_listed_in_the_report_and_the_gate_stays_green() -> None:
    verdict = judged(*ranks(seen(read()), seen(read())), taint="list")
    (check,) = verdict.checks
    assert (verdict.exit_code, check.name, check.status) == (0, CheckId.UNTAINTED.text, Status.INFO)
    text = printed(verdict)
    assert all(part in text for part in (TaintKind.RANK.value, "/app/model.py:12", AT.code))


def test_the_switch_turns_the_gate_red_with_the_line() -> None:
    verdict = judged(*ranks(seen(read()), seen(read())), taint="fail")
    (check,) = verdict.checks
    assert (verdict.exit_code, check.status, check.line, check.ranks) == (1, Status.FAIL, AT, (0, 1))
    assert "/app/model.py:12" in verdict.summary and "dist.get_rank()" in verdict.summary


def test_an_allowed_taint_is_green_under_the_switch_and_shown_with_its_reason() -> None:
    allowed = [("taint", "dist.get_rank()", REASON)]
    verdict = judged(*ranks(seen(read()), seen(read())), taint="fail", allowed=allowed)
    assert (verdict.exit_code, verdict.checks[0].status) == (0, Status.INFO)
    assert f"allowed: {REASON}" in printed(verdict)


def test_what_is_not_certain_is_never_red() -> None:
    verdict = judged(*ranks(seen(read(is_sure=False)), seen(read(is_sure=False))), taint="fail")
    assert (verdict.exit_code, verdict.checks[0].status) == (0, Status.INFO)


def test_a_clean_run_passes_and_prints_no_table() -> None:
    verdict = judged(*ranks(seen(), seen()), taint="fail")
    assert (verdict.exit_code, verdict.checks[0].status, verdict.checks[0].observed) == (0, Status.PASS, "none")
    assert list(findings.tables(verdict)) == []


def test_traced_code_that_was_not_searched_is_reported() -> None:
    searched = judged(*ranks(seen(), seen()), taint="list").checks[0]
    unsearched = judged(*ranks(compiled(), compiled()), taint="list").checks[0]
    assert unsearched.observed.startswith(searched.observed)
    assert "not searched" in unsearched.observed and "not searched" not in searched.observed


def test_the_gate_reads_switch_and_allow_list_from_the_config() -> None:
    rules = gate_rules(
        load("cpu_smoke", ["gate.taint=fail", f"gate.allow=[{{layer: taint, contains: rank, reason: '{REASON}'}}]"])
    )
    assert (rules.taint, list(rules.allowed)) == ("fail", [("taint", "rank", REASON)])
    with pytest.raises(ConfigError, match=r"gate\.taint"):
        load("cpu_smoke", ["gate.taint=ignore"])
