"""The first op that only some ranks run -> the line at which their stack leaves that of the others."""

from __future__ import annotations

from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.layers.parted_stacks import at_parting
from tpcompile.evidence.records import Item, ItemKind, UserLine
from tpcompile.evidence.records.causes import Cause


def at(number: int, function: str = "forward") -> UserLine:
    return UserLine(file="model.py", line=number, function=function)


def node(target: str, *stack: UserLine, is_known: bool = True) -> Item:
    callers = stack[:-1] if is_known else None
    fields = {"op": "call", "target": target, "args": "%0", "value": "f32[4]"}
    return Item(kind=ItemKind.NODE, about="%1", fields=fields, line=stack[-1], callers=callers)


LAYER = (node("mm", at(10), at(30, "attended")), node("relu", at(10), at(31, "attended")))
NORM = node("norm", at(11))


def lines(items: Items, row: Row, cause: Cause = Cause.RANK_BRANCH) -> list[int | None]:
    return [item.line.line if item and item.line else None for item in at_parting(row, items, cause)]


def test_the_op_of_one_layer_more_is_at_the_loop_over_the_layers() -> None:
    items = Items([(*LAYER, NORM), (*LAYER, *LAYER, NORM)])
    assert lines(items, Row([None, LAYER[0]])) == [None, 10]


def test_a_collective_is_compared_with_those_of_its_phase() -> None:
    def reduced(line: UserLine, *callers: UserLine, phase: str = "forward") -> Item:
        fields = {"op": "all_reduce", "shape": f"[{line.line}]"}
        return Item(kind=ItemKind.COLLECTIVE, about=phase, fields=fields, line=line, callers=callers)

    layer, last = reduced(at(30, "attended"), at(10)), reduced(at(11))
    backward = reduced(at(30, "attended"), at(10), phase="backward")
    items = Items([(layer, last, backward), (layer, layer, last, backward, backward)])
    assert lines(items, Row([None, layer]), Cause.EXTRA_COLLECTIVE) == [None, 10]
    assert lines(items, Row([None, backward]), Cause.EXTRA_COLLECTIVE) == [None, 10]


def test_so_it_is_where_the_others_have_ended() -> None:
    assert lines(Items([LAYER, LAYER * 2]), Row([None, LAYER[0]])) == [None, 10]


def test_two_functions_of_one_line_that_all_ranks_call_elsewhere_part_at_that_line() -> None:
    fast, slow = node("mm", at(5), at(20, "fast")), node("add", at(5), at(40, "slow"))
    assert lines(Items([(fast, slow), (slow, fast)]), Row([fast, slow])) == [5, 5]


def test_a_line_that_only_some_ranks_run_is_where_they_parted() -> None:
    """All call `before`, and those that do nothing in it leave no trace of that."""
    cast = node("double", at(5), at(53, "before"))
    assert lines(Items([(NORM,), (cast, NORM)]), Row([None, cast])) == [None, 53]


def test_of_three_groups_the_nearest_stack_counts() -> None:
    deep, near, far = node("tanh", at(5), at(21, "act")), node("relu", at(5), at(23, "act")), node("add", at(6))
    items = Items([(deep, near, far), (near, far, deep), (far, deep, near)])
    assert lines(items, Row([deep, near, far])) == [21, 23, 6]


def test_a_line_stays_where_stacks_are_not_known() -> None:
    unknown = node("mm", at(10), at(30, "attended"), is_known=False)
    items = Items([(unknown, NORM), (unknown, unknown, NORM)])
    assert lines(items, Row([None, unknown])) == [None, 30]


def test_a_line_stays_where_something_else_differed_first() -> None:
    items = Items([(NORM, *LAYER), (NORM, LAYER[0], LAYER[1], LAYER[1])])
    assert lines(items, Row([None, LAYER[1]])) == [None, 10]
    assert lines(items, Row([None, LAYER[0]])) == [None, 30]


def test_a_line_stays_for_other_causes() -> None:
    assert lines(Items([(*LAYER, NORM), (*LAYER, *LAYER)]), Row([None, LAYER[0]]), Cause.SHAPE) == [None, 30]
