"""Lowered items of several ranks -> the constants that follow the rank's coordinate."""

from __future__ import annotations

import pytest

from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.layers.equivalent import constants
from tpcompile.evidence.layers.spec import Affine, Followed
from tpcompile.evidence.records import Item, ItemKind, value_item

BOOL, FLOAT, INT = "b8[2, 5][5, 1]cpu", "f32[2, 5][5, 1]cpu", "i64[2, 5][5, 1]cpu"


def node(call: str, index: int = 1) -> Item:
    """The item of `target(args) -> value`."""
    head, _, value = call.rpartition(" -> ")
    target, _, args = head.partition("(")
    fields = {"op": "call", "target": target, "args": args.removesuffix(")"), "value": value}
    return Item(kind=ItemKind.NODE, about=f"%{index}", fields=fields)


def each(*coordinates: int) -> tuple[tuple[int, ...], ...]:
    """Groups of one rank each."""
    return tuple((at,) for at in coordinates)


def followed(*calls: str, coordinates: list[int] | None = None) -> Followed:
    """What is explained of ranks whose only lowered op is this call."""
    items = Items((value_item("%0", "placeholder input 0()"), node(call)) for call in calls)
    return constants(items, each(*(coordinates or range(len(calls)))))


def rows(*calls: str, coordinates: list[int] | None = None) -> list[Row]:
    """The rows of it."""
    return list(followed(*calls, coordinates=coordinates).rows)


def bound(value: object, op: str = "torch.ops.aten.lt.Scalar", result: str = BOOL) -> str:
    """A comparison with a vocabulary bound."""
    return f"{op}(%0, {value}) -> {result}"


def test_a_vocabulary_bound_that_follows_the_rank_is_explained() -> None:
    found = followed(*(bound(128 * rank) for rank in range(8)))
    assert found.maps == (Affine(0, 128),) and len(found.rows) == 1 and not found.left


def test_the_rows_that_differ_come_back_one_item_per_rank() -> None:
    found = rows(bound(0), bound(128)) or []
    assert [[item and item.says for item in row] for row in found] == [[f"call {bound(0)}", f"call {bound(128)}"]]


@pytest.mark.parametrize(
    "op", ["ge.Scalar", "slice.Tensor", "select.int", "narrow", "constant_pad_nd", "bitwise_and.Scalar"]
)
def test_ops_that_address_data_may_follow_the_rank(op: str) -> None:
    assert rows(bound(0, f"torch.ops.aten.{op}", FLOAT), bound(32, f"torch.ops.aten.{op}", FLOAT))


def test_the_index_of_a_split_may_follow_the_rank() -> None:
    assert rows(bound(0, "getitem", FLOAT), bound(1, "getitem", FLOAT))


def test_arithmetic_on_integers_may_follow_the_rank() -> None:
    assert rows(bound(0, "torch.ops.aten.sub.Tensor", INT), bound(32, "torch.ops.aten.sub.Tensor", INT))


@pytest.mark.parametrize("value", [lambda r: r + 1, lambda r: float(r + 1)])
def test_a_factor_of_a_float_tensor_is_never_explained(value) -> None:
    assert not rows(*(bound(value(r), "torch.ops.aten.mul.Tensor", FLOAT) for r in range(2)))


def test_a_float_bound_is_not_explained() -> None:
    assert not rows(bound(0.5), bound(1.5))


def test_a_constant_that_is_not_affine_in_the_coordinate_is_not_explained() -> None:
    assert not rows(bound(0), bound(32), bound(65), bound(96))


def test_the_coordinate_counts_and_not_the_position_in_the_list() -> None:
    assert followed(bound(7), bound(71), bound(39), coordinates=[0, 2, 1]).maps == (Affine(7, 32),)
    assert not rows(bound(0), bound(64), bound(32), coordinates=[0, 1, 2])


def test_ranks_without_coordinates_of_their_own_follow_none() -> None:
    assert not rows(bound(0), bound(32), coordinates=[1, 1])


def test_every_constant_of_a_row_must_follow_the_rank() -> None:
    def part(rank: int, step: int = 1) -> str:
        return f"torch.ops.aten.slice.Tensor(%0, 1, {32 * rank}, {32 * (rank + 1)}, {step}) -> {FLOAT}"

    assert followed(*(part(r) for r in range(4))).maps == (Affine(0, 32), Affine(32, 32))
    assert not rows(*(part(r, step=r * r) for r in range(4)))


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (bound(0), bound(32, op="torch.ops.aten.le.Scalar")),
        (bound(0), "torch.ops.aten.lt.Scalar(%5, 32) -> b8[2, 5][5, 1]cpu"),
        (bound(0), bound(32, result="b8[2, 6][6, 1]cpu")),
        (bound("[0, 1]"), bound("[32]")),
    ],
    ids=["another op", "another edge", "another shape", "another structure"],
)
def test_only_numbers_may_differ(here: str, there: str) -> None:
    assert not rows(here, there)


def test_graphs_of_different_length_are_not_explained() -> None:
    assert not constants(Items([(value_item("a", "b"),), ()]), each(0, 1)).rows


def test_one_unexplained_row_spoils_all() -> None:
    def items(rank: int) -> tuple[Item, ...]:
        factor = bound(rank + 1.0, "torch.ops.aten.mul.Tensor", FLOAT)
        return node(bound(32 * rank)), node(factor, 2)

    assert not constants(Items([items(0), items(1)]), each(0, 1)).rows


def test_equal_items_hold_no_constants() -> None:
    assert not rows(bound(32), bound(32))
