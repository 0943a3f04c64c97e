"""evidence/timeline: values that ranks set in the same lines -> the line that set them apart, and on which rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evidence.timeline import programs
from tests.evidence.timeline.test_part import flow_of, found_of, source_line
from tpcompile.evidence.records import Lead, Status, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.findings import Parted
from tpcompile.evidence.timeline import part, values
from tpcompile.evidence.timeline.conclude import side_text, with_branch
from tpcompile.evidence.timeline.flow import EXACT, Code, Flow, Kind
from tpcompile.evidence.timeline.values import Compared, Scopes, compared
from tpcompile.evidence.timeline.walk import Value, Walks, forks, kind_of

SET_APART = {
    programs.a_size_differs_once: (programs.tokens_of, ("returns 32", "returns 23")),
    programs.a_counter_runs_ahead: (programs.Packing.count, ("sets self.seen = 32", "sets self.seen = 28")),
    programs.a_setting_is_read_once: (programs.a_setting_is_read_once, ("sets width = 8", "sets width = 16")),
    programs.a_line_that_runs_late_makes_a_size_differ: (
        programs.a_line_that_runs_late_makes_a_size_differ, ("sets length = 16", "sets length = 8")
    ),
    programs.a_rate_is_halved_on_one_rank: (programs.noisy, ("returns 2", "returns 3")),
    programs.a_block_runs_under_a_setting: (programs.a_block_runs_under_a_setting, None),
    programs.the_rank_chooses_a_width: (programs.the_rank_chooses_a_width, ("sets width = 8", "sets width = 16")),
    programs.equal_by_chance_at_first: (programs.equal_by_chance_at_first, None),
    programs.a_loader_yields_a_short_batch: (programs.batches_of, ("sets rows = 4", "sets rows = 3")),
    programs.one_rank_logs_once_and_another_has_a_short_batch: (
        programs.one_rank_logs_once_and_another_has_a_short_batch, ("sets rows = 4", "sets rows = 3")
    ),
    programs.items_are_appended: (
        programs.items_are_appended, ("sets batch to a value of its own", "sets batch to a value of its own")
    ),
    programs.a_list_of_the_module_grows: (
        programs.note, ("sets PENDING to a value of its own", "sets PENDING to a value of its own")
    ),
}  # fmt: skip
"""Program -> the function with the line, and what the sides set; None where all three set something else."""
Program = Callable[[int], Any]


def marked(function: Callable[..., Any]) -> int:
    lines, first = inspect.getsourcelines(function)
    return next(number for number, line in enumerate(lines, start=first) if line.rstrip().endswith("# sets"))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("program", SET_APART)
def test_the_line_that_sets_a_value_apart_is_found_with_the_values(program: Program, num_ranks: int) -> None:
    found = found_of(program, num_ranks)
    assert found is not None
    function, values = SET_APART[program]
    assert (found.line.line, found.is_uneven) == (marked(function), False)
    assert values in (None, tuple(side.value for side in found.sides))
    assert {side.how for side in found.sides} == {"value"}


def test_where_a_method_of_an_object_is_called_what_made_the_object_is_named() -> None:
    """Its class is a value of it, and depends on what the caller passed; of two ranks and of three."""
    for num_ranks in (2, 3):
        found = found_of(programs.a_policy_is_chosen, num_ranks)
        assert found is not None and found.led_to is not None
        assert (found.line.line, found.is_uneven) == (marked(programs.a_policy_is_chosen), True)
        assert [side.value for side in found.sides] == ["passes kind = 'greedy'", "passes kind = 'sample'"]


@pytest.mark.parametrize("program", [programs.lengths_differ_all_the_time, programs.same_on_all])
def test_what_differs_by_habit_is_no_reason(program: Program) -> None:
    assert found_of(program, 2) is None


def test_without_habits_data_would_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""

    monkeypatch.setattr(Compared, "is_reason", lambda self, key: self.found.get(key) is not None or None)
    monkeypatch.setattr(part, "compared", lambda *args, **options: _all_new(compared(*args, **options)))
    assert found_of(programs.lengths_differ_all_the_time, 2) is not None


def _all_new(known: Compared) -> Compared:
    return Compared(known.found, frozenset(key for key, unlike in known.found.items() if unlike), known.once)


def test_a_majority_is_right_and_of_two_ranks_the_one_with_a_value_of_the_past() -> None:
    assert odd_of(programs.a_size_differs_once, (0, 1)) == (1,)
    assert odd_of(programs.a_size_differs_once, (1, 0)) == (0,)
    assert odd_of(programs.a_counter_runs_ahead, (0, 1)) == ()
    assert odd_of(programs.a_counter_runs_ahead, (0, 1, 2)) == (1,)


def odd_of(program: Program, order: tuple[int, ...]) -> tuple[int, ...]:
    found = parted_in(order, program)
    assert found is not None
    return found.odd


def parted_in(order: tuple[int, ...], program: Program) -> Parted | None:
    return part.parted(flows_of(program, order), {programs.__file__})


def flows_of(program: Program, order: tuple[int, ...] = (0, 1)) -> dict[int, Flow]:
    return {rank: flow_of(program, played) for rank, played in enumerate(order)}


def test_the_number_of_a_rank_is_no_reason_in_a_line_that_speaks_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the negative control, the line that reads the rank would be named."""
    monkeypatch.setattr(values, "speaks_of_rank", lambda *_: False)
    found = found_of(programs.the_rank_chooses_a_width, 2)
    assert found is not None
    assert found.line.line == marked(programs.the_rank_chooses_a_width) - 1


def test_the_last_value_that_follows_from_it_is_told_too() -> None:
    found = found_of(programs.a_size_differs_once, 2)
    assert found is not None and found.led_to is not None
    assert source_line(found.led_to.line).strip() == "slots = packing.slots(tokens)"


def test_the_branch_that_follows_from_a_value_is_told_too() -> None:
    """Not the same line again, which differs from then on."""
    found = found_of(programs.a_rate_is_halved_on_one_rank, 2)
    assert found is not None and found.led_to is not None
    assert source_line(found.led_to.line).strip() == "if num_bad == 2:"


def test_a_word_of_the_finding_leads_to_the_value_that_it_names() -> None:
    """What the lines of the end do not read: an attribute that compiled code reads, say."""

    def program(rank: int) -> None:
        for step in range(4):
            programs.tokens_of(rank, step + 4)
        programs.collective("done")

    flows = flows_of(program)
    assert part.parted(flows, {programs.__file__, __file__}) is None
    assert part.parted(flows, {programs.__file__, __file__}, ["tokens_of"]) is None, "it names a function, and no value"

    def setting(rank: int) -> None:
        packing = programs.Packing()
        for step in range(8):
            packing.ratio = 3 if (rank, step) == (1, 6) else 2
            programs.collective("step")

    found = part.parted(flows_of(setting), {programs.__file__, __file__}, ["packing", "ratio"])
    assert found is not None and found.odd == (1,)
    assert tuple(side.value for side in found.sides) == ("sets packing.ratio = 2", "sets packing.ratio = 3")


def test_a_value_that_the_finding_names_counts_where_it_differs_each_time() -> None:
    """It is what was found, no data: the line is named in which it first became different."""
    flows = flows_of(programs.depths_differ_all_the_time)
    found = part.parted(flows, {programs.__file__}, ["scale"])
    assert found is not None
    assert (found.line.line, found.odd) == (marked(programs.Depths.first), ())
    assert tuple(side.value for side in found.sides) == ("returns 0", "returns 4")
    assert part.parted(flows, {programs.__file__}, ["step"]) is None


def test_what_a_line_sets_beside_it_is_told_too() -> None:
    flows = flows_of(programs.heads_in_another_order)
    found = part.parted(flows, {programs.__file__}, ["size"])
    assert found is not None and found.line.line == marked(programs.heads_in_another_order)
    assert [side.value for side in found.sides] == [
        "sets size = 7, name = 'quality'", "sets size = 6, name = 'safety'"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "sides"),
    [
        (("max", "min"), ("sets op = 'max'", "sets op = 'min'")),
        ((torch.float32, torch.bfloat16), ("sets op = torch.float32", "sets op = torch.bfloat16")),
        (("a secret", "another"), ("sets op to a value of its own",) * 2),
        ((0.5, -3), ("sets op = 0.5", "sets op to a value of its own")),
        ((1 / 3, 1 / 7), ("sets op = 0.333", "sets op = 0.143")),
    ],
)
def test_a_value_is_shown_if_the_program_has_it_as_a_literal(values: tuple[Any, ...], sides: tuple[str, ...]) -> None:
    found = part.parted(flows_of(partial(programs.an_op_changes_once, values)), {programs.__file__})
    assert found is not None
    assert tuple(side.value for side in found.sides) == sides


def test_the_branch_that_chose_what_is_returned_is_the_reason() -> None:
    """One rank never executed the other line, so that their values cannot be compared."""
    found = found_of(programs.a_mode_changes_on_one_rank, 2)
    assert found is not None
    assert (found.line.line, found.is_uneven, found.odd) == (marked(programs.Policy.size), False, (1,))


@pytest.mark.parametrize(("cause", "is_named"), [(Cause.STUCK_COLLECTIVE, True), (Cause.KILLED, False)])
def test_a_rank_that_waits_may_do_so_for_sizes_that_differ(cause: Cause, is_named: bool) -> None:
    lead = Lead(cause=cause, says="rank 1 has died; rank 0 waits", ranks=(0,), is_by_past=True)
    verdict = Verdict(status=Status.FAIL, exit_code=1, world_size=2, summary="", lead=lead)
    found = with_branch(verdict, flows_of(programs.a_size_differs_once), {programs.__file__}).lead
    assert found is not None
    assert (found.cause, found.ranks, found.parted is not None) == (cause, (0, 1) if is_named else (0,), is_named)


def test_content_that_differs_keeps_its_cause_and_has_the_line() -> None:
    flows = flows_of(programs.a_size_differs_once)
    lead = Lead(cause=Cause.COLLECTIVE_SIZES, says="sizes differ", ranks=(0, 1), is_rank_known=False)
    verdict = Verdict(status=Status.FAIL, exit_code=1, world_size=2, summary="", lead=lead)
    found = with_branch(verdict, flows, {programs.__file__}).lead
    assert found is not None and found.line is not None and found.parted is not None
    assert (found.cause, found.ranks, found.is_rank_known) == (Cause.COLLECTIVE_SIZES, (0, 1), False)
    assert found.parted.odd == (1,)
    assert found.line.line == marked(programs.tokens_of)
    assert "returns 23" in side_text(found.parted.sides[1])
    assert found.do_first == "Make what is set there equal on all ranks."
    advised = lead.model_copy(update={"do_first": "Pad it."})
    red = with_branch(verdict.model_copy(update={"lead": advised}), flows, {programs.__file__}).lead
    assert red is not None and red.do_first.endswith("equal on all ranks. Or: Pad it.")


def test_a_long_call_of_one_rank_is_one_step_of_its_frame() -> None:
    """By the lines alone, the next pass of the loop would be nearer."""

    def program(rank: int) -> None:
        for step in range(6):
            if rank == 1 and step == 2:
                evaluates(30)
            programs.collective("step", step)

    def evaluates(times: int) -> None:
        for number in range(times):
            programs.log.append(number)

    walks = Walks.of(flows_of(program))
    (fork,) = forks(walks.steps[0], walks.steps[1], (0, 0))
    assert fork.ends[0] == fork.starts[0] and not fork.is_final
    assert kind_of(walks.steps[1][fork.starts[1]]) is Kind.LINE


def test_in_a_loop_a_pass_is_not_left_out_where_an_element_of_each_explains_it() -> None:
    def program(rank: int) -> None:
        for index in range(12):
            if (index * 5 + rank * 2) % 7 < 3:
                continue
            programs.collective("block", index)

    walks = Walks.of(flows_of(program))
    for fork in forks(walks.steps[0], walks.steps[1], (0, 0)):
        lines = [
            sum(kind_of(step) is Kind.LINE for step in walks.steps[rank][fork.starts[rank] : fork.ends[rank]])
            for rank in (0, 1)
        ]
        assert abs(lines[0] - lines[1]) <= 2, "both make the pass"


def test_values_are_compared_where_the_ranks_are_together() -> None:
    """The rings of a long job keep its newest steps, and not from the same step on."""
    code = Code(file="train.py", function="main", line=1, names=("x",))

    def own(start: int) -> list[Value]:
        return [Value(start + step, start + step + 1, (0, 5), "x", EXACT | step) for step in range(4)]

    walks = Walks([code], {0: [], 1: []}, (), {0: own(2), 1: own(0)})
    found = compared(walks, Scopes(walks.codes), 0, 1, [], (2, 0)).found
    assert len(found) == 4 and set(found.values()) == {None}
    assert any(compared(walks, Scopes(walks.codes), 0, 1, []).found.values()), "the negative control"


@pytest.mark.parametrize(("name", "is_new"), [("", False), ("x", True)])
def test_what_functions_return_is_no_variable_that_was_equal_before(name: str, is_new: bool) -> None:
    """A variable that other lines gave equal values is one that this line sets apart."""
    code = Code(file="train.py", function="main", line=1, names=("x",))
    places = [(0, 5), (0, 5), (0, 5), (0, 9), (0, 9)]
    mine, theirs = (
        [Value(at, at + 1, place, name, EXACT | (rank if place[1] == 9 else at)) for at, place in enumerate(places)]
        for rank in (7, 8)
    )
    walks = Walks([code], {0: [], 1: []}, (), {0: mine, 1: theirs})
    assert bool(compared(walks, Scopes(walks.codes), 0, 1, []).new) == is_new


def test_the_programs_are_marked() -> None:
    assert Path(programs.__file__).read_text().count("# sets\n") == len(SET_APART) + 10
