"""evidence/timeline: lines that ranks executed -> the branch at which they parted, and who left the common way."""

from __future__ import annotations

import inspect
import linecache
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.evidence.timeline import own_numbers, programs
from tests.evidence.timeline.programs import BROKEN, HEALTHY, Case
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.findings import Parted
from tpcompile.evidence.timeline import branch_past, given, own_way, pair, part, reasons, source, values, walk
from tpcompile.evidence.timeline.conclude import side_text
from tpcompile.evidence.timeline.depends import Dependence
from tpcompile.evidence.timeline.detours import detours
from tpcompile.evidence.timeline.flow import LINE_BITS, WATCHED, Code, Flow, Kind, pack, until
from tpcompile.evidence.timeline.own_branch import left_own_part, left_own_pass, left_own_way
from tpcompile.evidence.timeline.part import parted
from tpcompile.evidence.timeline.walk import Walks, forks, kind_of, place_of
from tpcompile.recording.flow import FlowRecorder

ISSUING = tuple(
    Code(file=module.__file__, function="", line=number)
    for module in (programs, own_numbers)
    for number, line in enumerate(Path(module.__file__).read_text().splitlines(), start=1)
    if line.strip().startswith("collective(")
)
"""Lines at which the programs issue collectives, which torch's flight recorder would know."""


def source_line(number: int) -> str:
    return linecache.getline(programs.__file__, number)


def flow_of(program: Callable[[int], Any], rank: int) -> Flow:
    """What is recorded of the program on that rank."""
    recorder = FlowRecorder()
    why_not = recorder.start(secrets.token_hex(8), by_settrace=True)
    assert not why_not
    try:
        program(rank)
        flow = recorder.flow()
    finally:
        recorder.stop()
    assert flow is not None
    return flow.model_copy(update={"issuing": ISSUING})


def found_of(program: Callable[[int], Any], num_ranks: int) -> Parted | None:
    return parted({rank: flow_of(program, rank) for rank in range(num_ranks)}, {programs.__file__})


def marked_lines(program: Callable[[int], Any]) -> set[int]:
    """Lines of the module with `# parts` that belong to the program: in it, or in the function that it alone uses."""
    lines, _ = inspect.getsourcelines(programs)
    numbers = {number for number, line in enumerate(lines, start=1) if line.rstrip().endswith(" parts")}
    used = {"data_ends_early": programs.batches, "a_bad_record_is_skipped": programs.parsed,
            "one_rank_saves_with_a_collective": programs.save,
            "data_ends_early_where_one_rank_logs": programs.shard,
            "one_rank_logs_and_once_with_a_collective": programs.on_the_first_rank}  # fmt: skip
    own, first = inspect.getsourcelines(used.get(program.__name__, program))
    return numbers & set(range(first, first + len(own)))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.program.__name__)
def test_the_branch_is_found_and_the_rank_that_left_its_own_past(case: Case) -> None:
    found = found_of(case.program, 2)
    assert found is not None
    assert {found.line.line} == marked_lines(case.program)
    assert found.odd == case.odd


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.program.__name__)
def test_of_three_ranks_the_one_outside_of_the_majority_is_odd(case: Case) -> None:
    found = found_of(case.program, 3)
    assert found is not None
    assert ({found.line.line}, found.odd) == (marked_lines(case.program), (1,))
    assert sorted(side.ranks for side in found.sides) == [(0, 2), (1,)]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.program.__name__)
def test_the_rank_to_which_the_others_are_compared_may_be_the_odd_one(case: Case) -> None:
    """And the others differ among each other: one of them logs."""
    flows = {rank: flow_of(case.program, program) for rank, program in enumerate((1, 0, 2))}
    found = parted(flows, {programs.__file__})
    assert found is not None
    assert ({found.line.line}, found.odd) == (marked_lines(case.program), (0,))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("program", HEALTHY)
def test_ranks_that_part_by_habit_have_not_parted(program: Callable[[int], Any], num_ranks: int) -> None:
    assert found_of(program, num_ranks) is None


def test_without_habits_a_rank_that_logs_would_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    monkeypatch.setattr(pair, "_is_habit", lambda *_: False)
    assert found_of(programs.rank_0_logs, 2) is not None


def test_where_a_coin_is_tossed_nobody_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_of(programs.a_coin_chooses_the_layer, 2)
    assert found is not None
    assert ({found.line.line}, found.odd) == (marked_lines(programs.a_coin_chooses_the_layer), ())
    monkeypatch.setattr(branch_past, "_KNOWN", 0.0)  # the negative control: the past is believed, whatever it told
    guessed = found_of(programs.a_coin_chooses_the_layer, 2)
    assert guessed is not None and guessed.odd != ()


def test_values_that_the_branch_reads_are_told_where_they_tell_the_sides_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument of the function; the item that one side of a loop took. What is equal, here the limit, is not."""
    assert given_of(programs.one_rank_stops_early) == ["loss = 0.2", "loss = 0.35"]
    programs.log.clear()
    assert given_of(programs.one_rank_has_a_setting_more) == ["", "key = 'overflow', value = 'drop'"]
    monkeypatch.setattr(given, "differ", lambda _: True)  # the negative control
    assert given_of(programs.one_rank_stops_early) == ["limit = 0.3, loss = 0.2", "limit = 0.3, loss = 0.35"]


def given_of(program: Callable[[int], Any]) -> list[str]:
    found = found_of(program, 2)
    assert found is not None
    told = [side.given for side in found.sides]
    assert all(f" with {text} " in side_text(side) for text, side in zip(told, found.sides, strict=True) if text)
    return told


def test_of_two_ranks_the_one_that_leaves_a_loop_over_items_earlier_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One has fewer items, or the other more. Where a pass issues a collective the ranks go through it together."""
    assert line_and_odd(programs.one_rank_has_a_setting_more)[1] == ()
    assert line_and_odd(programs.data_ends_early)[1] == ()
    assert line_and_odd(programs.time_is_over) == ("if is_over:  # parts", ())
    assert line_and_odd(programs.time_is_over, 3)[1] == (1,)  # a majority goes on
    monkeypatch.setattr(source, "may_end_loop", lambda *_: False)  # the negative control
    assert line_and_odd(programs.data_ends_early)[1] == (1,)
    assert line_and_odd(programs.time_is_over)[1] == (1,)


def test_a_value_of_which_each_rank_has_its_own_is_a_reason_only_where_no_other_tells_some_ranks_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = line_and_odd(programs.each_rank_has_a_folder_of_its_own, 3, is_of_sizes=True)
    assert found == ("words = (40, 40, 41)[rank]  # sets", (2,))
    assert line_and_odd(programs.each_rank_has_a_length_of_its_own, 3, is_of_sizes=True) == (
        "rows = (40, 44, 52)[rank]  # sets", (),
    )  # fmt: skip
    monkeypatch.setattr(part, "_are_all_different", lambda _: False)  # the negative control
    found = line_and_odd(programs.each_rank_has_a_folder_of_its_own, 3, is_of_sizes=True)
    assert found == ('folder = ("tmp-x2", "tmp-9f", "tmp-k0")[rank]', ())


def test_a_part_that_a_rank_takes_once_is_no_reason_where_another_rank_went_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is known to depend on either. What a function returns is no variable that was equal before."""
    found = line_and_odd(programs.one_rank_is_told_an_old_place, 4)
    assert found == ("if epoch > 0 and is_old:  # parts", (3,))
    monkeypatch.setattr(reasons.Reasons, "is_part", lambda *_: False)  # the negative control
    assert line_and_odd(programs.one_rank_is_told_an_old_place, 4)[0] == "if rank == 0 and step < 1:"


def test_an_item_that_no_branch_reads_says_more_than_what_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = line_and_odd(programs.a_burst_is_ordered_on_each_rank, is_of_sizes=True)[0]
    assert found == "for name in self.steps[step]:  # orders"
    old, strength = reasons._Strength.OLD_ITEM, reasons.Reasons._strength  # the negative control
    monkeypatch.setattr(
        reasons.Reasons, "_strength", lambda self, *one: old if self.is_item(one[0]) else strength(self, *one)
    )
    assert line_and_odd(programs.a_burst_is_ordered_on_each_rank, is_of_sizes=True)[0] == "batch.append(name)"


def test_of_a_rank_with_a_part_of_its_own_the_detour_is_named_that_is_like_none_before() -> None:
    flows = {rank: flow_of(programs.the_first_rank_scores, rank) for rank in (0, 1)}
    found = left_own_part(flows, 0)
    assert found is not None and found.usual is not None
    assert (source_line(found.line.line).strip(), found.odd) == ("if number == 2:  # parts", (0,))
    healthy = {rank: flow_of(programs.rank_0_logs, rank) for rank in (0, 1)}
    assert left_own_part(healthy, 0) is None, "the negative control: all are alike"
    assert left_own_part(flows, 1) is None, "it has no part of its own"
    assert left_own_part({0: flows[0]}, 0) is None


def test_where_both_leave_what_they_did_before_nobody_is_blamed() -> None:
    """Most passes skip a layer, so that the past mostly told it; when a layer is trained, it never told."""
    found = found_of(programs.layers_are_sampled_anew, 2)
    assert found is not None
    assert ({found.line.line}, found.odd) == (marked_lines(programs.layers_are_sampled_anew), ())


def test_ranks_of_different_domains_have_roles() -> None:
    """In the program of one domain, what the stages do differently from the start would be the branch."""
    flows = {rank: flow_of(programs.stages, rank) for rank in (0, 1)}
    across = parted(flows, {programs.__file__}, is_same_program=False)
    assert across is not None
    assert {across.line.line} == marked_lines(programs.stages)
    healthy = {rank: flow_of(lambda played: programs.stages(played, num_steps=5), rank) for rank in (0, 1)}
    assert parted(healthy, {programs.__file__}, is_same_program=False) is None
    assert parted(healthy, {programs.__file__}) is not None, "the negative control"


def steps(text: str) -> list[int]:
    """`m1` line 1 of function m, `+f` its start, `-f` its return."""
    kinds = {"+": Kind.START, "-": Kind.RETURN}
    found = []
    for token in text.split():
        kind = kinds.get(token[0], Kind.LINE)
        name, line = (token[1], 0) if token[0] in kinds else (token[0], int(token[1:]))
        found.append(ord(name) << 32 | kind << LINE_BITS | line)
    return found


def branches(mine: str, theirs: str) -> list[tuple[str, int, bool]]:
    """(function, line, whether they stay apart) of each fork."""
    found = forks(steps(mine), steps(theirs), (0, 0))
    return [(chr(fork.branch[0]), fork.branch[1], fork.is_final) for fork in found]


def test_ranks_that_part_as_before_are_together_as_before() -> None:
    """Else the end of one of them, right after it, would be put down to the line at which rank 0 logs."""
    passes = "m1 m4 m5 m2 m3 " * 4, "m1 m4 m5 m2 " * 4
    assert branches(f"{passes[0]} m1 m7 m8 m7 m8 m7", f"{passes[1]} m1 m9 m5 m6 m5 m6")[-1] == ("m", 1, True)


def test_the_walk_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(branches("m1 m2 m3 " * 9, "m1 m2 " * 9)) > 1
    monkeypatch.setattr(walk, "_MAX_S", -1.0)
    assert branches("m1 m2 m3 " * 9, "m1 m2 " * 9) == []


def test_of_many_ranks_those_are_compared_for_which_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_of(programs.idle_rank_runs_a_dummy, 3) is not None
    monkeypatch.setattr(part, "_MAX_S", -1.0)
    assert found_of(programs.idle_rank_runs_a_dummy, 3) is None


def test_ranks_that_have_left_a_frame_are_together_in_the_line_of_their_caller() -> None:
    mine, theirs = "+m m1 +f f2 f3 f4 -f m5 m6 m8", "+m m1 +f f2 f7 f8 -f m5 m9 m7"
    assert branches(mine, theirs) == [("f", 2, False), ("m", 5, True)]


def test_the_later_branch_that_it_decides_is_told_too() -> None:
    found = found_of(programs.a_flag_is_set_long_before, 2)
    assert found is not None and found.led_to is not None
    (extra,) = [code.line for code in ISSUING if 'collective("extra")' in source_line(code.line)]
    assert found.led_to.line == extra - 1
    at_once = found_of(programs.idle_rank_runs_a_dummy, 2)
    assert at_once is not None and at_once.led_to is None


def test_what_each_rank_did_is_told_by_function() -> None:
    found = found_of(programs.idle_rank_runs_a_dummy, 2)
    assert found is not None
    sides = {side.ranks: (side.how, side.line and side.line.function) for side in found.sides}
    assert sides == {(0,): ("enters", "execute"), (1,): ("enters", "execute_dummy")}
    assert found.times == 4


def test_two_ranks_without_a_past_are_both_shown_and_none_is_blamed() -> None:
    def at_once(rank: int) -> None:
        if rank == 0:
            programs.collective("one")
        else:
            programs.collective("other")

    found = found_of(at_once, 2)
    assert found is not None
    assert (found.odd, len(found.sides)) == ((), 2)


def test_a_rank_that_is_behind_has_not_parted() -> None:
    flows = {rank: flow_of(programs.same_on_all, 0) for rank in (0, 1)}
    behind = flow_of(lambda _rank: [programs.collective(step) for step in range(3)], 0)
    assert parted({0: flows[0], 1: flows[1]}) is None
    assert parted({0: behind, 1: behind}) is None


def test_a_flow_of_a_broken_peer_is_refused() -> None:
    flow = flow_of(programs.same_on_all, 0)
    for packed in ("?", "AAAA", flow.packed[: len(flow.packed) // 2]):
        with pytest.raises(ValueError):
            parted({0: flow, 1: flow.model_copy(update={"packed": packed})})
    with pytest.raises(ValueError):
        parted({0: flow, 1: flow.model_copy(update={"codes": ()})})


def test_files_that_this_process_does_not_run_are_never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(source, "read", lambda file, _line: opened.append(file) or frozenset())
    monkeypatch.setattr(source, "assigned", lambda file, _line: opened.append(file) or frozenset())
    flows = {rank: flow_of(programs.scaler_skips_a_step, rank) for rank in (0, 1)}
    assert parted(flows, set()) is not None
    assert opened == []


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ("xabcdefghijkl", "abcdefghijkl", [((0, 0), (1, 0))]),
        ("abcdefghijkl", "xyabcdefghijkl", [((0, 0), (0, 2))]),
        ("x1ybcdefghijklm", "z1bcdefghijklm", [((0, 0), (1, 1)), ((2, 2), (3, 2))]),
        ("abc", "xyz", [((0, 0), (3, 3))]),
    ],
)
def test_the_fewest_detours_are_taken(mine: str, theirs: str, expected: object) -> None:
    assert detours([*map(ord, mine)], [*map(ord, theirs)], (0, 0)) == expected


def test_a_long_detour_is_found() -> None:
    common = [*range(1000, 1100)]
    assert detours([*range(500), *common], common, (0, 0)) == [((0, 0), (500, 0))]


@pytest.mark.parametrize(("num_ranks", "odd"), [(2, ()), (3, (0,))])
def test_at_a_branch_at_which_a_rank_always_parts_its_own_past_blames_nobody(
    num_ranks: int, odd: tuple[int, ...]
) -> None:
    """Rank 0 logs, and once with a collective: that the other rank never did so makes it no odd one."""
    found = found_of(programs.one_rank_logs_and_once_with_a_collective, num_ranks)
    assert found is not None
    assert ({found.line.line}, found.odd) == (marked_lines(programs.one_rank_logs_and_once_with_a_collective), odd)


def sent() -> UserLine:
    """The line that sends, in the function that the stages call."""
    lines, first = inspect.getsourcelines(programs.send)
    at = next(first + number for number, line in enumerate(lines) if line.rstrip().endswith("# sends"))
    return UserLine(file=programs.__file__, line=at, function="send")


def test_a_rank_without_peers_is_compared_with_its_own_past() -> None:
    found = left_own_way(flow_of(programs.stage, 0), 3, sent())
    assert found is not None and found.usual is not None
    assert ({found.line.line}, found.odd) == (marked_lines(programs.stage), (3,))
    went, usual = found.sides[0].line, found.usual.line
    assert went is not None and source_line(went.line).strip() == "continue"
    assert usual is not None and source_line(usual.line).strip() == "send(part)"
    assert found.usual.calls == ("send",)


def test_a_rank_that_goes_on_as_before_or_never_came_there_has_left_no_way() -> None:
    recorder = FlowRecorder()
    why_not = recorder.start(secrets.token_hex(8), by_settrace=True)
    assert not why_not
    on_its_way = programs.slow_stage(recorder.flow)
    recorder.stop()
    assert left_own_way(on_its_way, 0, sent()) is None
    assert left_own_way(flow_of(programs.same_on_all, 0), 0, sent()) is None


def after_step(rank: int, step: int) -> bool:
    """A callback of a library's loop, which ends where it returns True."""
    is_over = False
    if rank == 1 and step == 5:
        is_over = True
    return is_over


def trained(rank: int) -> None:
    any(map(partial(after_step, rank), range(8)))


def test_of_a_rank_that_left_something_out_the_end_of_what_it_executed_is_where_it_parted() -> None:
    """The loop is a library's: of what the ranks do after the branch, one line of the program is all that is seen."""
    lines, first = inspect.getsourcelines(trained)
    runs = (__file__, first + next(number for number, line in enumerate(lines) if "any(" in line))
    flows = {rank: until(flow_of(trained, rank), [runs]) for rank in (0, 1)}
    behind = parted(flows, {__file__})
    assert behind is None or not behind.is_uneven, "it may come there yet"
    found = parted(flows, {__file__}, over=(1,))
    assert found is not None
    assert (found.line.function, found.odd, found.is_uneven) == ("after_step", (1,), True)
    assert linecache.getline(__file__, found.line.line).strip().startswith("if rank == 1")


def sized(rank: int) -> None:
    if rank == 0:
        after_step(rank, 0)
    for step in range(9):
        size = 16 - 8 * (rank == 1 and step > 4)
        after_step(0, size)


def test_a_branch_after_which_a_value_was_equal_is_not_why_it_differs_later() -> None:
    """Rank 0 writes the checkpoint; long after that a batch of rank 1 is shorter."""
    found = parted({rank: flow_of(sized, rank) for rank in (0, 1)}, {__file__})
    assert found is not None
    assert linecache.getline(__file__, found.line.line).strip().startswith("size = 16")


@pytest.mark.parametrize(("past", "odd"), [((2, 2, 2), (1,)), ((2, 4, 8), ())])
def test_a_value_that_was_always_the_same_is_the_usual_one_and_one_of_many_is_not(
    past: tuple[int, ...], odd: tuple[int, ...]
) -> None:
    flows = {rank: flow_of(lambda rank: programs.widths(*past, (2, 16)[rank]), rank) for rank in (0, 1)}
    found = parted(flows, {programs.__file__}, ["width"])
    assert found is not None
    assert [side.value for side in found.sides] == ["sets width = 2", "sets width = 16"]
    assert found.odd == odd


def test_how_long_a_loop_was_each_time_before_foretells_its_end() -> None:
    found = found_of(programs.a_layer_more_in_the_last_step, 2)
    assert found is not None
    assert found.odd == (1,)


def line_and_odd(program: Callable[[int], Any], num_ranks: int = 2, **given: Any) -> tuple[str, tuple[int, ...]]:
    found = parted({rank: flow_of(program, rank) for rank in range(num_ranks)}, {programs.__file__}, **given)
    assert found is not None
    return source_line(found.line.line).strip(), found.odd


def test_where_ranks_part_by_habit_it_is_in_what_the_line_called() -> None:
    line, _ = line_and_odd(programs.memory_runs_out_again_and_again)
    assert line == "if rank == 1 and step % 2 == 0:  # parts"


def test_the_branch_that_changed_what_a_loop_goes_over_is_named_for_ranks_that_part_each_time() -> None:
    line, _ = line_and_odd(programs.a_config_has_one_layer_more)
    assert line == "if folder:  # parts"


def test_what_a_function_is_given_was_made_by_the_line_that_called_it() -> None:
    found = parted({rank: flow_of(programs.a_mode_is_passed, rank) for rank in (0, 1)}, {programs.__file__}, ["modes"])
    assert found is not None
    assert source_line(found.line.line).rstrip().endswith("# passes")
    assert [side.value.partition(" ")[0] for side in found.sides] == ["passes", "passes"]


def test_the_item_of_a_loop_is_no_reason_and_what_reads_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    program = programs.weights_without_gradients_are_skipped
    assert line_and_odd(program)[0] == "if weight is None:  # parts"
    monkeypatch.setattr(source, "is_loop", lambda *_: False)  # the negative control
    assert line_and_odd(program)[0] == "for weight in weights:"


def test_a_coordinate_in_a_mesh_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = {rank: flow_of(programs.each_rank_has_its_place_in_a_mesh, rank) for rank in range(4)}
    named = ["row", "column"]
    files = {programs.__file__}
    assert parted(flows, files, named) is None
    monkeypatch.setattr(walk, "_LEAST_MESH", 5)  # the negative control
    found = parted(flows, files, named)
    assert found is not None and source_line(found.line.line).strip() == "row, column = divmod(rank, 2)"


def test_of_sizes_that_differ_no_role_is_the_reason() -> None:
    """Without it, the negative control, the stage that receives nothing would be named."""
    assert line_and_odd(programs.stages_of_a_pipeline, 3, is_of_sizes=True) == (
        "parts = -(-rows // most)  # parts",
        (2,),
    )
    assert line_and_odd(programs.stages_of_a_pipeline, 3)[0] == "if rank != 0:"


def test_what_was_set_once_since_all_was_equal_is_the_reason_for_what_differs_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, _ = line_and_odd(programs.an_order_is_made_anew)
    assert line.endswith("# orders")
    monkeypatch.setattr(
        reasons.Reasons, "_equal_until", lambda self, _: len(self.walks.steps[0])
    )  # the negative control
    line, _ = line_and_odd(programs.an_order_is_made_anew)
    assert line == "all_of(names)"


def test_what_each_layer_reads_is_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert line_and_odd(programs.layers_read_a_setting)[0].endswith("# factors")
    monkeypatch.setattr(values, "_is_one_thing", lambda *_: False)  # the negative control
    assert line_and_odd(programs.layers_read_a_setting)[0] == "size = int(16 * routers[0].factor)"


def test_what_parts_the_ranks_before_they_meet_again_is_one_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no habit, and the items before tell nothing of the next one."""
    assert line_and_odd(programs.a_list_is_filled) == ("if sum(parts[-1]) + item > room:  # parts", ())
    monkeypatch.setattr(pair.Pair, "apart", lambda _, alike: list(alike))  # the negative control
    assert line_and_odd(programs.a_list_is_filled)[0] == "for part in parts:"


def test_where_a_function_returns_by_another_line_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert line_and_odd(programs.a_file_cannot_be_read)[0].endswith("# parts")
    monkeypatch.setattr(reasons.Reasons, "_has_lines", lambda *_: False)  # the negative control
    assert line_and_odd(programs.a_file_cannot_be_read)[0] == "if state is not None:"


def test_where_a_line_raised_the_handler_is_the_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "is_handler", lambda *_: False)  # the negative control
    assert line_and_odd(programs.a_file_cannot_be_read)[0] == "if state is not None:"


def test_the_part_that_a_rank_has_in_a_program_is_no_reason_where_what_it_does_comes_from_a_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, odd = line_and_odd(programs.stages_with_parts_of_their_own, 3)
    assert (line, odd) == ("return 4 if FREE[rank] > 8 else 2", (2,))
    monkeypatch.setattr(reasons.Reasons, "speaks_of_rank", lambda *_: False)  # the negative control
    assert line_and_odd(programs.stages_with_parts_of_their_own, 3)[0] == "if rank == 0:"


def test_what_a_generator_yields_first_was_made_by_its_lines() -> None:
    flows = {rank: flow_of(programs.buckets_are_of_another_size, rank) for rank in (0, 1)}
    found = parted({rank: first_pass(flow) for rank, flow in flows.items()}, {programs.__file__}, ["flat"])
    assert found is not None
    assert source_line(found.line.line).strip().endswith("# parts")


def test_what_a_loop_takes_from_a_generator_was_made_where_that_yields_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = {rank: flow_of(programs.a_copy_of_a_file_has_a_shorter_line, rank) for rank in (0, 1)}
    found = parted(flows, {programs.__file__}, ["line"])
    assert found is not None and source_line(found.line.line).strip().endswith("# yields")
    assert all(" yields " in side_text(side) for side in found.sides)
    pursued = Dependence._is_pursued
    without = lambda self, key, *, given_by=None, yielded_by=None: pursued(self, key, given_by=given_by)  # noqa: E731
    monkeypatch.setattr(Dependence, "_is_pursued", without)  # the negative control
    found = parted(flows, {programs.__file__}, ["line"])
    assert found is not None and source_line(found.line.line).strip().startswith("for line in")


def first_pass(flow: Flow) -> Flow:
    """Until the first collective is entered."""
    number = next(at for at, code in enumerate(flow.codes) if code.function == "collective")
    steps = flow.steps()
    return flow.changed(packed=pack(steps[: [step[0] for step in steps].index(number) + 1]))


def test_of_two_ranks_nobody_is_blamed_where_each_decides_by_data_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert line_and_odd(programs.each_rank_has_its_own_score) == ("if score > best:  # parts", ())
    monkeypatch.setattr(pair.Pair, "reads_own_data", lambda *_: False)  # the negative control
    assert line_and_odd(programs.each_rank_has_its_own_score)[1] != ()


def test_where_the_part_of_a_rank_begins_is_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = {rank: flow_of(programs.each_rank_has_rows_of_its_own, rank) for rank in (0, 1)}
    found = parted(flows, {programs.__file__}, ["rows"])
    assert found is not None and source_line(found.line.line).rstrip().endswith("# ends")
    monkeypatch.setattr(values, "parts_by_rank", lambda *_: False)  # the negative control
    found = parted(flows, {programs.__file__}, ["rows"])
    assert found is not None and source_line(found.line.line).strip() == "begin = rank * each"


def test_what_a_hook_is_given_was_not_made_by_the_line_that_ran_it() -> None:
    flows = {rank: flow_of(programs.a_hook_is_given_a_weight, rank) for rank in (0, 1)}
    assert parted(flows, {programs.__file__}, ["weight"]) is None


def test_what_setattr_may_have_set_is_what_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = {rank: flow_of(programs.settings_are_those_of_a_node, rank) for rank in (0, 1)}
    found = parted(flows, {programs.__file__}, ["slots"])
    assert found is not None and source_line(found.line.line).strip().startswith("for name, value in")
    monkeypatch.setattr(source, "ANY_ATTRIBUTE", "")  # the negative control
    found = parted(flows, {programs.__file__}, ["slots"])
    assert found is not None and source_line(found.line.line).strip() == "if rank == 0:"


def test_a_line_that_the_others_executed_is_told_by_the_branch_that_kept_one_rank_from_it() -> None:
    flows = {rank: flow_of(programs.one_node_has_no_settings, rank) for rank in range(3)}
    found = parted(flows, {programs.__file__}, ["slots"])
    assert found is not None and found.odd == (1,)
    assert source_line(found.line.line).strip() == "if rank != 1:"


def test_a_hook_that_one_rank_lacks_was_registered_in_a_line_that_it_did_not_execute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert line_and_odd(programs.a_hook_is_registered_on_some_ranks, 3) == ("if weight.has_gradient:  # parts", (1,))
    monkeypatch.setattr(reasons.Reasons, "_making", lambda *_: None)  # the negative control
    assert line_and_odd(programs.a_hook_is_registered_on_some_ranks, 3)[0] != "if weight.has_gradient:  # parts"


def test_a_function_that_a_line_calls_by_its_name_was_not_registered_before() -> None:
    line, _ = line_and_odd(programs.one_rank_saves_what_is_best)
    assert line == "if step == 1 or (step == 4 and rank == 1):  # parts"


def newest(flow: Flow, num_setup: int, *, keeps_setup: bool = True) -> Flow:
    """The flow of a job that has run for so long that its first steps are known only as its setup."""
    steps = flow.steps()
    setup = pack(steps[:num_setup]) if keeps_setup else ""
    return flow.changed(packed=pack(steps[num_setup:]), num_before=num_setup, setup=setup)


def late_flows(program: Callable[[int], Any], *, keeps_setup: bool = True) -> dict[int, Flow]:
    """From the first collective on, beside the setup."""
    found = {}
    for rank in (0, 1):
        flow = flow_of(program, rank)
        number = next(at for at, code in enumerate(flow.codes) if code.function == "collective")
        found[rank] = newest(flow, [step[0] for step in flow.steps()].index(number), keeps_setup=keeps_setup)
    return found


def test_where_the_first_steps_are_kept_apart_they_are_looked_at_as_well() -> None:
    found = parted(late_flows(programs.settings_are_those_of_a_node), {programs.__file__}, ["slots"])
    assert found is not None and source_line(found.line.line).strip().startswith("for name, value in")
    without = late_flows(programs.settings_are_those_of_a_node, keeps_setup=False)
    assert parted(without, {programs.__file__}, ["slots"]) is None


def test_what_ranks_did_differently_at_first_is_no_reason_where_nothing_depends_on_it() -> None:
    assert parted(late_flows(programs.one_rank_logs_at_first), {programs.__file__}, ["slots"]) is None
    whole = {rank: flow_of(programs.one_rank_logs_at_first, rank) for rank in (0, 1)}
    assert parted(whole, {programs.__file__}, ["slots"]) is not None  # the last thing that they did differently
    watched = {rank: watched_from(flow, "collective") for rank, flow in whole.items()}
    assert parted(watched, {programs.__file__}, ["slots"]) is None


def watched_from(flow: Flow, function: str) -> Flow:
    """The flow of a rank whose watch begins where that function is entered first."""
    steps, number = flow.steps(), len(flow.codes)
    at = next(index for index, (code, _) in enumerate(steps) if flow.codes[code].function == function)
    steps.insert(at, (number, Kind.MARK << LINE_BITS | 1))
    return flow.changed(codes=(*flow.codes, WATCHED), packed=pack(steps))


def test_a_function_that_was_too_busy_in_the_setup_is_known_behind_it() -> None:
    flows = {rank: watched_from(flow_of(programs.a_busy_setup, rank), "collective") for rank in (0, 1)}
    for rank, flow in flows.items():
        steps, codes = flow.steps(), [code.function for code in flow.codes]
        busy = codes.index("a_busy_setup")
        silenced = flow.changed(packed=pack([(busy, Kind.MARK << LINE_BITS), *steps]))
        found = Walks.of({rank: silenced})
        lines = [place_of(step) for step in found.steps[rank] if kind_of(step) is Kind.LINE and step >> 32 == busy]
        known = [source_line(line).strip() for _, line in lines]
        assert "log.append(number)" not in known and "log.append(step)" in known
        late = flow.changed(packed=pack([*steps, (busy, Kind.MARK << LINE_BITS)]))
        assert busy not in {step >> 32 for step in Walks.of({rank: late}).steps[rank]}


def test_ranks_that_are_known_to_agree_show_what_is_harmless() -> None:
    files, named = {programs.__file__}, ["training"]
    flows = {rank: flow_of(programs.a_mode_is_not_restored, rank) for rank in range(3)}
    found = parted(flows, files, named, alike=[(0, 2), (1,)])
    assert found is not None
    assert (source_line(found.line.line).strip(), found.odd) == ("if not documents:  # parts", (1,))
    of_rank_0 = parted(flows, files, named)  # the negative control
    assert of_rank_0 is not None and of_rank_0.odd == (0,)


def test_a_value_that_differs_between_ranks_that_agree_is_no_reason() -> None:
    files = {programs.__file__}
    flows = {rank: flow_of(programs.costs_decide_about_the_order, rank) for rank in range(3)}
    found = parted(flows, files, ["rows"], alike=[(0, 2), (1,)])
    assert found is not None
    assert ([side.ranks for side in found.sides], found.odd) == ([(0, 2), (1,)], (1,))
    assert found.times == 5
    of_nobody = parted(flows, files, ["rows"])  # the negative control: the first one that differs
    assert of_nobody is not None and (of_nobody.odd, of_nobody.times) == ((2,), 2)


def test_a_value_that_was_set_once_says_as_much_as_a_branch_that_was_passed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = programs.a_setting_changes_what_is_made
    assert line_and_odd(program, 3, named=["weight"])[0].endswith("# sets")
    monkeypatch.setattr(reasons.Reasons, "is_first", lambda *_: False)  # the negative control
    assert line_and_odd(program, 3, named=["weight"])[0] == "if self.fused:"


def test_where_ranks_part_in_a_line_without_a_choice_it_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    line, odd = line_and_odd(programs.one_rank_unfreezes_too_early, 3)
    assert (line.endswith("# parts"), odd) == (True, (1,))
    monkeypatch.setattr(reasons.Reasons, "decides", lambda *_: True)  # the negative control
    assert "registered(encoder)" in line_and_odd(programs.one_rank_unfreezes_too_early, 3)[0]


def test_a_branch_that_gives_ranks_their_parts_is_no_reason_where_another_is(monkeypatch: pytest.MonkeyPatch) -> None:
    line, odd = line_and_odd(programs.a_request_comes_late, 3)
    assert (line.endswith("# parts"), odd) == (True, (1,))
    monkeypatch.setattr(reasons.Reasons, "is_part", lambda *_: False)  # the negative control
    assert line_and_odd(programs.a_request_comes_late, 3)[0] == "if rank == 1:"


def test_a_loop_that_ends_one_pass_too_early_is_told_from_what_came_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = until_sent(flow_of(programs.a_last_stage, 0))
    found = left_own_way(flow, 2, sent())
    assert found is not None and found.usual is not None
    assert ({found.line.line}, found.odd) == (marked_lines(programs.a_last_stage), (2,))
    monkeypatch.setattr(own_way, "_LOOKED_AT", 0)  # the negative control: the loop is left each time
    assert left_own_way(flow, 2, sent()) is None


def test_a_part_that_was_left_out_among_others_is_told_from_the_ways_between_them() -> None:
    flow = until_sent(flow_of(programs.a_last_stage_skips_a_part, 2))
    found = left_own_pass(flow, 2, sent())
    assert found is not None and found.usual is not None
    assert ({found.line.line}, found.odd) == (marked_lines(programs.a_last_stage_skips_a_part), (2,))
    assert left_own_way(flow, 2, sent()) is None, "after the last part it goes on as before"
    as_before = until_sent(flow_of(programs.a_last_stage_skips_a_part, 1))
    assert left_own_pass(as_before, 1, sent()) is None, "the negative control"


def test_what_a_rank_does_for_the_first_time_has_left_out_nothing() -> None:
    flow = until_sent(flow_of(programs.a_stage_logs_once, 0))
    assert left_own_way(flow, 2, sent()) is None


def test_a_rank_that_made_one_step_more_went_on_behind_it_before() -> None:
    found = left_own_pass(flow_of(programs.a_stage_logs_between_two_parts, 0), 2, sent())
    assert found is not None and found.usual is not None
    assert (found.sides[0].how, found.usual.how) == ("line", "line"), "it did not end there"


def until_sent(flow: Flow) -> Flow:
    """Without the steps behind the last collective."""
    steps = flow.steps()
    number = max(at for at, code in enumerate(flow.codes) if code.function == "collective")
    end = max(at for at, (code, _) in enumerate(steps) if code == number)
    return flow.changed(packed=pack(steps[:end]))


def test_a_list_of_data_that_is_shorter_than_the_others_is_named_by_its_length() -> None:
    flows = {rank: flow_of(programs.documents_are_filtered, rank) for rank in range(3)}
    found = parted(flows, {programs.__file__})
    assert found is not None
    assert source_line(found.line.line).rstrip().endswith("# sets")
    assert ([side.value for side in found.sides], found.odd, found.times) == (
        ["sets len(chosen) = 4", "sets len(chosen) = 3"], (1,), 5,
    )  # fmt: skip
    as_before = {rank: flow_of(programs.documents_are_filtered, rank) for rank in (0, 2)}
    assert parted(as_before, {programs.__file__}) is None, "the negative control: what is in it says nothing"


def test_what_a_signal_changed_is_named_by_the_branch_that_acts_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    line, odd = line_and_odd(programs.a_signal_comes, 3)
    assert (line.endswith("# parts"), odd) == (True, (1,))
    monkeypatch.setattr(reasons.Reasons, "decides", lambda *_: True)  # the negative control: the line that ran then
    assert "operator.call" in line_and_odd(programs.a_signal_comes, 3)[0]


def test_a_line_that_changes_what_differed_before_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = {rank: until_sent(flow_of(programs.a_count_is_resumed, rank)) for rank in range(3)}
    files = {programs.__file__}
    found = parted(flows, files)
    assert found is not None
    assert (source_line(found.line.line).strip(), found.odd) == ("return (self.count + 1) % 4 == 0", (1,))
    monkeypatch.setattr(reasons.Reasons, "_carries_on", lambda *_: False)  # the negative control
    of_counter = parted(flows, files)
    assert of_counter is not None and source_line(of_counter.line.line).strip() == "counted.count += 1"


def test_what_stages_do_all_the_time_is_not_named_where_one_does_something_once() -> None:
    line, odd = line_and_odd(programs.the_last_stage_expects_more, 3)
    assert (line.endswith("# parts"), odd) == (True, (2,))


@pytest.mark.parametrize(
    ("program", "odd"),
    [(programs.a_reading_lacks_a_key, (1,)), (programs.a_hook_is_registered_on_the_first_rank, (0,))],
)
def test_the_choice_behind_a_line_that_has_none_is_not_merely_the_newest(
    program: Callable[[int], Any], odd: tuple[int, ...]
) -> None:
    """The exception that it raised, or the branch that registered what it calls."""
    line, found = line_and_odd(program, 3)
    assert (line.endswith("# parts"), found) == (True, odd)


def test_where_a_generator_yielded_who_took_the_value_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    line, odd = line_and_odd(programs.a_bank_is_smaller, 3)
    assert (line.endswith("# parts"), odd) == (True, (1,))
    monkeypatch.setattr(source, "is_yield", lambda *_: False)  # the negative control
    assert line_and_odd(programs.a_bank_is_smaller, 3)[0] == "for number in range(count):"


def test_where_two_ranks_are_known_to_differ_the_past_blames_none_of_them() -> None:
    flows = {rank: flow_of(programs.scaler_skips_a_step, rank) for rank in (0, 1)}
    files = {programs.__file__}
    found, of_the_past = parted(flows, files, alike=[(0,), (1,)]), parted(flows, files)
    assert found is not None and of_the_past is not None
    assert (found.line, found.odd) == (of_the_past.line, ())
    assert of_the_past.odd == (1,), "the negative control"
