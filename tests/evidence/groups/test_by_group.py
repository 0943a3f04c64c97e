"""One value for each group of ranks: which groups differ, and what only some of them have."""

from __future__ import annotations

from tpcompile.evidence.groups.by_group import ByGroup, Items, Row
from tpcompile.evidence.records import Item, value_item


def item(about: str, value: str = "1") -> Item:
    return value_item(about, value)


def test_groups_are_picked_and_made_into_something_else_in_order() -> None:
    values = ByGroup(["a", "bb", "c"])
    assert values.map(len) == (1, 2, 1)
    assert values.differ(len) and not values.differ(bool)
    assert values.where(lambda value: len(value) == 1) == {0, 2}
    assert values.picked([2, 0]) == ("c", "a")


def test_own_items_are_those_that_not_every_group_has() -> None:
    items = Items([(item("a"), item("b")), (item("a"), item("b", "2"))])
    assert items.own() == ((item("b"),), (item("b", "2"),))
    assert [row.first.about for row in items.differing()] == ["b"]


def test_a_place_that_one_group_has_not_reached_differs() -> None:
    items = Items([(item("a"), item("b")), (item("a"),)])
    assert items.differing() == [(item("b"), None)]


def test_a_row_agrees_only_where_every_group_has_an_item() -> None:
    full, half = Row([item("a"), item("a", "2")]), Row([item("a"), None])
    assert full.agree_in(lambda own: own.about) and not full.agree_in(lambda own: own.fields["value"])
    assert not half.agree_in(lambda own: own.about) and not half.all_are(lambda own: own.about == "a")
    assert half.owners == {0}


def test_fields_that_differ_keep_the_order_in_which_they_are_asked_for() -> None:
    ours = Item(about="x", fields={"dtype": "f32", "shape": "[4]", "stride": "[1]"})
    theirs = Item(about="x", fields={"dtype": "f32", "shape": "[5]", "stride": "[2]"})
    assert Row([ours, theirs]).differing(["stride", "dtype", "shape"]) == ["stride", "shape"]
