"""evidence/timeline/conclude: a verdict and what the ranks executed -> what it leads with, and what it keeps."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.evidence.timeline import programs
from tests.evidence.timeline.test_part import flow_of
from tpcompile.evidence.records import (
    CheckId,
    Divergence,
    DivergenceClass,
    Layer,
    Lead,
    RankGroup,
    Status,
    UserLine,
    Verdict,
)
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.findings import Parted, Went
from tpcompile.evidence.timeline import conclude, part
from tpcompile.evidence.timeline.conclude import NOT_RECORDED, with_branch, with_branch_of, without_branch
from tpcompile.evidence.timeline.flow import LINE_BITS, Code, Flow, Kind, pack, until
from tpcompile.recording.flow import IS_POSSIBLE

READABLE = {programs.__file__}


@pytest.fixture(scope="module")
def flows() -> dict[int, Flow]:
    return {rank: flow_of(programs.idle_rank_runs_a_dummy, rank) for rank in (0, 1)}


def verdict(cause: Cause, ranks: tuple[int, ...] = (0,), **lead: Any) -> Verdict:
    found = Lead(cause=cause, says="as it was", ranks=ranks, **{"is_by_past": True, **lead})
    return Verdict(status=Status.FAIL, exit_code=1, world_size=2, summary="as it was", lead=found)


def test_a_stuck_collective_is_the_consequence_of_the_branch(flows: dict[int, Flow]) -> None:
    found = with_branch(verdict(Cause.STUCK_COLLECTIVE), flows, READABLE)
    assert found.lead is not None and found.lead.line is not None
    assert (found.lead.cause, found.lead.ranks, found.lead.consequence) == (
        Cause.PARTED, (0, 1), "stuck in a collective: as it was"
    )  # fmt: skip
    usual, other = map(conclude.side_text, found.lead.parted.sides if found.lead.parted else ())
    assert usual.endswith(", as all did before") and "before" not in other
    assert "execute_dummy(step)" in found.lead.line.code
    assert [check.id for check in found.checks] == [CheckId.SAME_BRANCHES]


def test_a_rank_that_an_exception_took_past_an_except_has_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it came to the line of the `except`, which did not catch it."""
    of_three = {rank: flow_of(programs.a_handler_does_not_catch, rank) for rank in range(3)}
    stuck = verdict(Cause.STUCK_COLLECTIVE, (1,)).model_copy(update={"world_size": 3})
    lead = with_branch(stuck, of_three, READABLE).lead
    assert lead is not None and lead.line is not None and lead.parted is not None
    assert (lead.cause, lead.ranks) == (Cause.RAISED, (1,))
    # sys.settrace shows the end of a function by an exception as a return of it.
    assert ("# parts" in lead.line.code) if IS_POSSIBLE else ("taken(" in lead.line.code)
    assert lead.parted.sides[1].how == "raises"
    monkeypatch.setattr(part, "is_not_caught", lambda *_: False)  # the negative control
    lead = with_branch(stuck, of_three, READABLE).lead
    assert lead is not None and lead.line is not None
    assert (lead.cause, lead.line.code) == (Cause.PARTED, "except KeyError:")


@pytest.mark.parametrize(
    ("cause", "is_by_past", "ranks"),
    [
        (Cause.STUCK_COLLECTIVE, True, (0, 1)), (Cause.STUCK_COLLECTIVE, False, (0,)), (Cause.RAISED, False, (0, 1)),
        (Cause.DTYPE, False, (0, 1)), (Cause.GRAPH_BREAK, False, (0,)),
    ],
)  # fmt: skip
def test_of_two_ranks_that_parted_at_a_branch_nobody_is_blamed_by_a_past_or_by_how_it_ended(
    cause: Cause, is_by_past: bool, ranks: tuple[int, ...]
) -> None:
    """Ranks of other domains may be a majority. What one of two compiled alone, the other one may lack;
    a graph that one of them broke is its own fault.
    """
    flows = {rank: flow_of(programs.data_ends_early, rank) for rank in (0, 1)}
    before = verdict(cause, line=UserLine(file="main.py", line=1, function="f"), is_by_past=is_by_past)
    found = with_branch(before, flows, READABLE)
    assert found.lead is not None and found.lead.parted is not None
    assert found.lead.parted.odd == ()
    assert (found.lead.ranks, found.lead.is_rank_known) == (ranks, ranks != (0, 1))


@pytest.mark.parametrize(("odd", "ranks", "before"), [((2, 3), (0, 1, 2, 3), [True, False]), ((3,), (3,), [False] * 2)])
def test_two_against_two_are_as_undecided_as_one_against_one(
    odd: tuple[int, ...], ranks: tuple[int, ...], before: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = UserLine(file=programs.__file__, line=1, function="step")
    others = tuple(rank for rank in range(4) if rank not in odd)
    sides = tuple(Went(ranks=each, how="line", line=line) for each in (others, odd))
    monkeypatch.setattr(conclude, "parted", lambda *_, **__: Parted(line=line, times=4, sides=sides, odd=odd))
    flows = {rank: flow_of(programs.same_on_all, rank) for rank in range(4)}
    stuck = verdict(Cause.STUCK_COLLECTIVE, odd).model_copy(update={"world_size": 4})
    found = with_branch(stuck, flows, READABLE)
    assert found.lead is not None and found.lead.parted is not None
    assert (found.lead.ranks, [side.is_as_before for side in found.lead.parted.sides]) == (ranks, before)
    assert found.checks[0].is_rank_known == found.lead.is_rank_known == (len(odd) == 1)


@pytest.mark.parametrize(("witnesses", "ranks"), [((2, 3), (1,)), ((), (0, 1))])
def test_of_two_ranks_of_a_domain_the_other_replicas_say_which_one_went_another_way(
    witnesses: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    flows = {rank: flow_of(programs.data_ends_early, rank) for rank in range(4)}
    two = {rank: flows[rank] for rank in (0, 1)}
    stuck = verdict(Cause.STUCK_COLLECTIVE, (0, 1), is_rank_known=False).model_copy(update={"world_size": 4})
    found = with_branch(stuck, two, READABLE, lambda: {rank: flows[rank] for rank in witnesses})
    assert found.lead is not None and found.lead.ranks == ranks


@pytest.mark.parametrize("cause", [Cause.KILLED, Cause.STOPPED_RESPONDING, Cause.STUCK_COLLECTIVE])
def test_a_branch_after_which_all_issue_the_same_collectives_stops_no_rank(cause: Cause) -> None:
    """It may have led to other data: of content that differs, it has the line."""
    flows = {rank: flow_of(programs.one_rank_reads_again_once, rank) for rank in (0, 1)}
    assert with_branch(verdict(cause), flows, READABLE) == verdict(cause)
    found = with_branch(verdict(Cause.DTYPE), flows, READABLE)
    assert found.lead is not None and found.lead.line is not None
    assert found.lead.line.code == "if rank == 1 and step == 3:"


@pytest.mark.parametrize(
    ("ranks", "is_known", "is_led"), [((1,), True, True), ((0,), True, False), ((0, 1), False, True)]
)
def test_one_line_that_issues_more_on_one_rank_is_explained_by_a_branch_before(
    ranks: tuple[int, ...], is_known: bool, is_led: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both name the same rank, or no rank left anything out."""
    flows = {rank: flow_of(programs.a_plan_lacks_an_entry, rank) for rank in range(2)}
    monkeypatch.setattr(part, "_odd", lambda *_: (1,))  # of more ranks, one is outside of the majority
    red = verdict(Cause.STUCK_COLLECTIVE, ranks, is_rank_known=is_known)
    found = with_branch(red, flows, READABLE)
    assert (found != red) == is_led
    if is_led:
        assert found.lead is not None and found.lead.line is not None and found.lead.parted is not None
        assert (found.lead.line.code, found.lead.parted.odd) == ("if name in LEFT_OUT[rank]:  # parts", (1,))


def until_collective(flow: Flow, number: int) -> Flow:
    """Up to the line that issues it."""
    steps = flow.steps()
    code = next(at for at, code in enumerate(flow.codes) if code.function == "collective")
    starts = [at for at, (each, packed) in enumerate(steps) if each == code and packed >> LINE_BITS == Kind.START]
    return flow.changed(packed=pack(steps[: starts[number]]))


@pytest.mark.parametrize(("number", "ranks", "is_led"), [(7, (1,), True), (7, (2,), False), (9, (1,), False)])
def test_the_only_thing_that_a_rank_did_differently_since_all_met_explains_what_it_left_out(
    number: int, ranks: tuple[int, ...], is_led: bool
) -> None:
    """Not of another rank, and not what it did before they met."""
    whole = {rank: flow_of(programs.one_rank_reads_again_once, rank) for rank in range(3)}
    flows = {rank: until_collective(flow, number) for rank, flow in whole.items()}
    red = verdict(Cause.STUCK_COLLECTIVE, ranks, is_rank_known=True)
    found = with_branch(red, flows, READABLE).lead
    assert found is not None
    assert (found.line is not None and found.line.code == "if rank == 1 and step == 3:") == is_led


@pytest.mark.parametrize(
    ("cause", "words"), [(Cause.STUCK_COLLECTIVE, []), (Cause.COLLECTIVE_SIZES, []), (Cause.DTYPE, ["as", "it", "was"])]
)
def test_only_words_about_content_name_variables(
    cause: Cause, words: list[str], flows: dict[int, Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []
    monkeypatch.setattr(conclude, "parted", lambda _flows, _files, named, **_: told.append(named))
    with_branch(verdict(cause), flows, READABLE)
    assert told[0] == words


def test_ranks_that_compiled_the_same_or_used_one_group_are_alike(
    flows: dict[int, Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[tuple[int, ...]]] = []
    monkeypatch.setattr(conclude, "parted", lambda *_, alike, **__: told.append(alike))
    with_branch(verdict(Cause.GROUP, (1,), is_rank_known=True), flows, READABLE)
    with_branch(verdict(Cause.COLLECTIVE_SIZES, (1,), is_rank_known=True, is_by_past=False), flows, READABLE)
    with_branch(verdict(Cause.STUCK_COLLECTIVE, (1,), is_rank_known=True), flows, READABLE)
    with_branch(verdict(Cause.COLLECTIVE_SIZES, (1,), is_rank_known=True), flows, READABLE)  # by a past alone
    difference = Divergence(
        layer=Layer.GRAPH, cls=DivergenceClass.CONTENT, domain="tp", where="C/first", title="one", cause=Cause.DTYPE,
        groups=(RankGroup(ranks=(0, 2)), RankGroup(ranks=(1,))),
    )  # fmt: skip
    red = verdict(Cause.DTYPE, (1,)).model_copy(update={"divergences": (difference,)})
    with_branch(red, flows, READABLE)
    assert (told[0], told[1], told[-1]) == ([(0,), (1,)], [(0,), (1,)], [(0, 2), (1,)])
    assert set(map(tuple, told[2:-1])) == {()}, "what ranks wait in is no proof that they did the same"


@pytest.mark.parametrize(("cause", "ranks"), [(Cause.AGREED_VALUES, (0,)), (Cause.PYTHON_VALUE, (2,))])
def test_whose_value_differs_from_that_of_most_ranks_is_known_whatever_branch_explains_it(
    cause: Cause, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = UserLine(file=programs.__file__, line=1, function="step")
    sides = (Went(ranks=(0, 1), how="line", line=line), Went(ranks=(2,), how="line", line=line))
    monkeypatch.setattr(conclude, "parted", lambda *_, **__: Parted(line=line, times=4, sides=sides, odd=(2,)))
    flows = {rank: flow_of(programs.same_on_all, rank) for rank in range(3)}
    red = verdict(cause, (0,)).model_copy(update={"world_size": 3})
    found = with_branch(red, flows, READABLE)
    assert found.lead is not None and found.lead.ranks == ranks


@pytest.mark.parametrize("program", [programs.a_buffer_is_stretched, programs.a_shard_is_shorter])
def test_where_other_ranks_agree_the_value_that_this_one_set_differently_is_named(program: Any) -> None:
    """The last one since they met before, or else the first; without a second rank that agrees, what all do is left."""
    lines = [
        number for number, line in enumerate(Path(programs.__file__).read_text().splitlines(), 1) if "# agrees" in line
    ]

    def named(num_ranks: int) -> UserLine | None:
        of_all = {rank: flow_of(program, rank) for rank in range(num_ranks)}
        red = verdict(Cause.AGREED_VALUES, (1,), is_rank_known=True).model_copy(update={"world_size": num_ranks})
        lead = with_branch(red, of_all, READABLE).lead
        assert lead is not None and (lead.cause, lead.ranks) == (Cause.AGREED_VALUES, (1,))
        return lead.line

    found = named(3)
    assert found is not None and found.line in lines
    found = named(2)
    assert found is None or found.line not in lines


def test_of_content_that_differs_the_branch_gives_the_line_and_the_rank(flows: dict[int, Flow]) -> None:
    found = with_branch(verdict(Cause.AUTOCAST, is_rank_known=False), flows, READABLE)
    assert found.lead is not None and found.lead.line is not None
    assert (found.lead.cause, found.lead.says, found.lead.ranks) == (Cause.AUTOCAST, "as it was", (0, 1))
    assert found.lead.line.function == "idle_rank_runs_a_dummy"
    assert found.checks == ()


def test_a_guard_names_the_value_for_which_the_ranks_compiled_different_collectives() -> None:
    """Nothing has run yet, so that no branch explains them. Without the guard, the negative control, no value does."""
    flows = {rank: flow_of(programs.depths_differ_all_the_time, rank) for rank in (0, 1)}
    red = verdict(Cause.EXTRA_COLLECTIVE, (0, 1), is_rank_known=False)
    assert with_branch(red, flows, READABLE) == red
    groups = tuple(RankGroup(ranks=(rank,)) for rank in (0, 1))
    difference = Divergence(
        layer=Layer.GRAPH, cls=DivergenceClass.COLLECTIVES, domain="tp", where="C/first", groups=groups, title="one",
        cause=Cause.EXTRA_COLLECTIVE, guard="EQUALS_MATCH: self.scale == 1.0",
    )  # fmt: skip
    found = with_branch(red.model_copy(update={"divergences": (difference,)}), flows, READABLE)
    assert found.lead is not None and found.lead.line is not None
    assert (found.lead.cause, found.lead.line.function) == (Cause.EXTRA_COLLECTIVE, "Depths.first")


@pytest.mark.parametrize(("is_known", "is_led"), [(True, True), (False, False)])
def test_content_of_one_rank_that_no_other_rank_explains_comes_of_its_own_part(is_known: bool, is_led: bool) -> None:
    flows = {rank: flow_of(programs.the_first_rank_scores, rank) for rank in (0, 1)}
    groups = tuple(RankGroup(ranks=(rank,)) for rank in (1, 0))
    difference = Divergence(
        layer=Layer.GRAPH, cls=DivergenceClass.CONTENT, domain="tp", where="C/first", title="one",
        cause=Cause.PYTHON_VALUE, groups=groups,
    )  # fmt: skip
    red = verdict(Cause.PYTHON_VALUE, is_rank_known=is_known, is_by_past=False)
    red = red.model_copy(update={"divergences": (difference,)})
    found = with_branch(red, flows, READABLE)
    assert (found != red) == is_led
    if is_led:
        assert found.lead is not None and found.lead.line is not None
        assert (found.lead.cause, found.lead.ranks) == (Cause.PYTHON_VALUE, (0,))
        assert found.lead.line.code == "if number == 2:  # parts"


def test_of_content_what_to_do_is_told_for_the_branch_first(flows: dict[int, Flow]) -> None:
    red = verdict(Cause.DTYPE, (0, 1), is_rank_known=False, do_first="Cast it.", line=UserLine(file="m.py", line=3))
    found = with_branch(red, flows, READABLE).lead
    assert found is not None and found.seen_at == UserLine(file="m.py", line=3)
    assert found.do_first.startswith("Make all ranks take the same branch") and found.do_first.endswith("Or: Cast it.")


def test_a_rank_whose_lines_are_not_known_stays_to_blame(flows: dict[int, Flow]) -> None:
    """One of a different domain: a branch between ranks 0 and 1 does not explain it."""
    before = verdict(Cause.STUCK_COLLECTIVE, (3,))
    assert with_branch(before, flows, READABLE) == before


def test_ranks_of_a_domain_are_compared_first_and_then_all(flows: dict[int, Flow]) -> None:
    before = verdict(Cause.STUCK_COLLECTIVE)
    both = with_branch(before, flows, READABLE)
    assert with_branch(before, {0: flows[0]}, READABLE, lambda: {1: flows[1]}) == both
    assert with_branch(before, {0: flows[0]}, READABLE) == before, "the negative control"
    asked: list[int] = []
    assert with_branch(before, flows, READABLE, lambda: asked.append(1) or {}) == both
    assert not asked, "what a different stage does is no matter"


def test_what_a_different_stage_does_explains_no_difference_between_programs_of_one(flows: dict[int, Flow]) -> None:
    """Its ranks take the branch of their own stage, `if is_first`, which is new at the first step."""
    groups = tuple(RankGroup(ranks=(rank,)) for rank in (0, 2))
    difference = Divergence(
        layer=Layer.GRAPH, cls=DivergenceClass.CONTENT, domain="tp", where="", groups=groups, title="one"
    )
    before = verdict(Cause.RANK_CONSTANT, (0, 2), is_rank_known=False)
    of_domain = before.model_copy(update={"divergences": (difference,)})
    assert with_branch(of_domain, {0: flows[0]}, READABLE, lambda: {1: flows[1]}) == of_domain
    assert with_branch(before, {0: flows[0]}, READABLE, lambda: {1: flows[1]}) != before, "the negative control"


def test_a_rank_that_raised_in_that_function_parted_because_it_raised(flows: dict[int, Flow]) -> None:
    raised = UserLine(file=programs.__file__, line=1, function="idle_rank_runs_a_dummy")
    before = verdict(Cause.RAISED, line=raised, is_by_past=False)
    assert with_branch(before, flows, READABLE).lead == before.lead
    elsewhere = with_branch(verdict(Cause.RAISED, line=raised.model_copy(update={"function": "send"})), flows, READABLE)
    assert elsewhere.lead is not None and elsewhere.lead.cause is Cause.PARTED


def test_code_of_other_files_is_not_read(flows: dict[int, Flow]) -> None:
    found = with_branch(verdict(Cause.STUCK_COLLECTIVE), flows, set())
    assert found.lead is not None and found.lead.line is not None
    assert found.lead.line.code == ""


def test_without_lines_it_is_said_how_to_have_them_where_a_branch_may_be_the_reason() -> None:
    assert NOT_RECORDED in without_branch(verdict(Cause.STUCK_COLLECTIVE)).checks
    assert without_branch(verdict(Cause.AUTOCAST)).checks == ()


def test_a_replay_keeps_what_the_live_verdict_knew(flows: dict[int, Flow]) -> None:
    before = verdict(Cause.STUCK_COLLECTIVE)
    live = with_branch(before, flows, READABLE)
    assert with_branch_of(live, before).lead == live.lead
    assert with_branch_of(before, before) == before
    assert with_branch_of(without_branch(before), before) == without_branch(before)


@pytest.mark.parametrize(
    ("is_habit", "code"), [(True, "log.append(1 // (step - 4))  # parts"), (False, "if rank != 0:")]
)
def test_past_a_branch_that_parts_all_ranks_each_time_the_one_that_left_its_own_way_is_named(
    is_habit: bool, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flows = {rank: flow_of(programs.the_first_rank_writes_and_fails, rank) for rank in (0, 1)}
    flows[1] = until(flows[1], [(programs.__file__, programs.collective.__code__.co_firstlineno)])  # where it waits
    lines, first = inspect.getsourcelines(programs.written)
    number = next(number for number, line in enumerate(lines, start=first) if line.strip() == "if rank != 0:")
    role = UserLine(file=programs.__file__, line=number, function="written")
    at_role = Parted(line=role, times=4, sides=(), is_habit=is_habit)
    monkeypatch.setattr(conclude, "parted", lambda *_, **__: at_role)
    of_more_ranks = verdict(Cause.CALL_COUNT).model_copy(update={"world_size": 3})
    for red, ranks in ((of_more_ranks, (0,)), (verdict(Cause.CALL_COUNT), (0, 1))):
        found = with_branch(red, flows, READABLE)
        assert found.lead is not None and found.lead.line is not None
        assert (found.lead.ranks, found.lead.line.code) == (ranks, code)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_came_after_it_was_seen_that_values_differ_is_no_habit(num_ranks: int) -> None:
    program = programs.a_state_is_resumed_otherwise
    flows = {rank: flow_of(program, rank) for rank in range(num_ranks)}
    lines, first = inspect.getsourcelines(program)
    agrees = next(first + at for at, line in enumerate(lines) if line.rstrip().endswith("# agrees"))
    seen_at = UserLine(file=programs.__file__, line=agrees, function=program.__name__)
    known = verdict(Cause.AGREED_VALUES, (1,), line=seen_at, is_rank_known=num_ranks > 2, at_call=6)
    red = known.model_copy(update={"world_size": num_ranks})
    found = with_branch(red, flows, READABLE)
    assert found.lead is not None and found.lead.line is not None
    assert found.lead.line.code == "if self.count >= 8:  # parts"
    at_the_end = known.model_copy(update={"lead": known.lead and known.lead.model_copy(update={"at_call": 0})})
    lead = with_branch(at_the_end, flows, READABLE).lead
    assert lead is not None and (lead.line is None or "# parts" not in lead.line.code), "the negative control"


def with_calls(flow: Flow, line: UserLine, region: str) -> Flow:
    """Each execution of the line calls a compiled region."""
    at = len(flow.codes)
    step, steps, calls = Kind.LINE << LINE_BITS | line.line, list[tuple[int, int]](), 0
    for code, packed in flow.steps():
        steps.append((code, packed))
        if packed == step and flow.codes[code].file == line.file:
            calls += 1
            steps.append((at, Kind.MARK << LINE_BITS | calls))
    region_code = Code(file="", function=f"Net.{region}", line=0)
    return flow.changed(codes=(*flow.codes, region_code), packed=pack(steps))


def test_what_came_after_the_call_that_one_rank_alone_compiled_explains_nothing() -> None:
    """The alarm may come at the end of the job; then the ranks have done much since."""
    program, region = programs.a_preview_fails_now_and_then_on_one_rank, "forward net.py:3"
    lines, first = inspect.getsourcelines(program)
    calls = next(first + at for at, line in enumerate(lines) if line.rstrip().endswith("# calls"))
    seen_at = UserLine(file=programs.__file__, line=calls, function=program.__name__)
    flows = {rank: with_calls(flow_of(program, rank), seen_at, region) for rank in range(3)}
    assert flows[1].call_of(region, 5) == (seen_at, 5)
    assert flows[1].call_of("backward", 5) is None and flows[1].call_of(region, 99) is None
    groups = (RankGroup(ranks=(0, 2)), RankGroup(ranks=(1,)))
    compiled = Divergence(
        layer=Layer.GRAPH, cls=DivergenceClass.CONTENT, domain="tp", where="", title="one", cause=Cause.PYTHON_VALUE,
        groups=groups, frame=region, step=5,
    )  # fmt: skip
    red = verdict(Cause.PYTHON_VALUE, (1,), is_rank_known=True)
    red = red.model_copy(update={"world_size": 3, "divergences": (compiled,)})
    found = with_branch(red, flows, READABLE)
    assert found.lead is not None and found.lead.line is not None
    assert found.lead.line.code == "if not prompt:  # parts"
    at_the_end = red.model_copy(update={"divergences": (compiled.model_copy(update={"step": None}),)})
    assert with_branch(at_the_end, flows, READABLE).lead == at_the_end.lead, "the negative control"


def test_past_the_branch_of_a_role_a_part_that_was_left_out_among_others_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = programs.a_last_stage_skips_a_part
    waits = [(programs.__file__, programs.collective.__code__.co_firstlineno)]
    flows = {rank: until(flow_of(program, rank), waits) for rank in range(3)}
    lines, first = inspect.getsourcelines(programs.send)
    sends = next(first + at for at, line in enumerate(lines) if line.rstrip().endswith("# sends"))
    sent = UserLine(file=programs.__file__, line=sends, function="send")
    role = UserLine(file=programs.__file__, line=1, function="step")
    at_role = Parted(line=role, times=4, sides=(), odd=(0,), is_habit=True)
    monkeypatch.setattr(conclude, "parted", lambda *_, **__: at_role)
    stuck = verdict(Cause.STUCK_COLLECTIVE, (2,), line=sent, left_out=sent)
    red = stuck.model_copy(update={"world_size": 3})

    def named() -> str:
        found = with_branch(red, flows, READABLE)
        assert found.lead is not None and found.lead.line is not None
        return found.lead.line.code

    assert named().endswith("# parts")
    monkeypatch.setattr(conclude, "left_own_pass", lambda *_: None)  # the negative control
    assert not named().endswith("# parts")


@pytest.mark.parametrize(("is_habit", "ranks"), [(True, (0, 1, 2)), (False, (2,))])
def test_a_role_that_is_not_among_the_ranks_of_the_finding_is_not_to_blame(
    is_habit: bool, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 1 wait for each other; rank 2 takes another branch each time, as the last stage does."""
    line = UserLine(file=programs.__file__, line=1, function="step")
    sides = (Went(ranks=(0, 1), how="line", line=line), Went(ranks=(2,), how="line", line=line))
    stage = Parted(line=line, times=4, sides=sides, odd=(2,), is_habit=is_habit)
    monkeypatch.setattr(conclude, "parted", lambda *_, **__: stage)
    flows = {rank: flow_of(programs.same_on_all, rank) for rank in range(3)}
    stuck = verdict(Cause.STUCK_COLLECTIVE, (0, 1), is_rank_known=False).model_copy(update={"world_size": 3})
    found = with_branch(stuck, flows, READABLE)
    assert found.lead is not None and found.lead.ranks == ranks


@pytest.mark.parametrize(
    ("how", "ranks", "text"),
    [("line", (3,), "rank 3 goes on at"), ("line", (0, 1), "ranks 0-1 go on at"), ("ends", (0, 1), "ranks 0-1 end")],
)
def test_several_ranks_have_a_plural(how: Any, ranks: tuple[int, ...], text: str) -> None:
    line = UserLine(file="engine.py", line=5, function="step")
    assert conclude.side_text(Went(ranks=ranks, how=how, line=line)).startswith(text)


def test_ranks_that_wait_in_a_ring_are_all_to_blame_for_the_branch() -> None:
    flows = {rank: flow_of(programs.two_rings, rank) for rank in range(4)}
    found = with_branch(verdict(Cause.STUCK_COLLECTIVE, (0, 1, 2, 3), is_by_past=False), flows, READABLE)
    assert found.lead is not None and found.lead.line is not None
    assert (found.lead.ranks, found.lead.line.code) == ((0, 1, 2, 3), "if step == 3 and rank in (1, 2):  # parts")
    of_one = verdict(Cause.STUCK_COLLECTIVE, (1,))
    assert with_branch(of_one, flows, READABLE) == of_one


@pytest.mark.parametrize(("ring", "is_led"), [((0, 1, 2), True), ((0, 1, 3), False)])
def test_of_a_ring_the_rank_that_took_another_branch_is_to_blame(ring: tuple[int, ...], is_led: bool) -> None:
    """A fourth rank waits for the ring, and is in none; a branch of a rank outside of it explains it not."""
    flows = {rank: flow_of(programs.a_round_is_restored, rank) for rank in range(4)}
    stuck = verdict(Cause.STUCK_COLLECTIVE, ring, is_by_past=False).model_copy(update={"world_size": 4})
    found = with_branch(stuck, flows, READABLE)
    assert (found != stuck) == is_led
    if is_led:
        assert found.lead is not None and found.lead.line is not None
        assert (found.lead.ranks, found.lead.line.code) == ((2,), "if rank == 2 and step == 4:  # parts")


def test_a_rank_whose_loop_ended_has_not_left_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the negative control, the rank whose loops are over would be to blame."""
    flows = {rank: flow_of(programs.loops_that_end_one_after_the_other, rank) for rank in (0, 1)}
    lines, first = inspect.getsourcelines(programs.loops_that_end_one_after_the_other)
    waits = first + next(at for at, line in enumerate(lines) if "step" in line)
    flows[1] = until(flows[1], [(programs.__file__, waits)])
    stuck = verdict(Cause.STUCK_COLLECTIVE, (0, 1), is_rank_known=False)
    found = with_branch(stuck, flows, READABLE)
    assert found.lead is not None and found.lead.parted is not None
    assert (found.lead.parted.usual, found.lead.parted.line.code) == (None, "for _ in range(3 + rank):")
    monkeypatch.setattr(conclude, "is_loop", lambda *_: False)
    found = with_branch(stuck, flows, READABLE)
    assert found.lead is not None and found.lead.parted is not None and found.lead.parted.usual is not None


def test_only_a_rank_that_left_something_out_will_not_execute_more(
    flows: dict[int, Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for what no other rank does is stuck as well: its last step is no branch."""
    given: list[Any] = []
    monkeypatch.setattr(conclude, "parted", lambda *_, over, **__: given.append(over))
    with_branch(verdict(Cause.STUCK_COLLECTIVE, (1,)), flows, READABLE)
    line = UserLine(file=programs.__file__, line=1, function="step")
    with_branch(verdict(Cause.STUCK_COLLECTIVE, (1,), left_out=line), flows, READABLE)
    assert given == [(), (1,)]
