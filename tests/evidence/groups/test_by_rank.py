"""One value of each rank: which ranks have the same value, and which a different one."""

from __future__ import annotations

from tpcompile.evidence.groups.by_rank import ByRank


def itself(value: str) -> str:
    return value


def test_ranks_are_in_order_whatever_order_they_came_in() -> None:
    values = ByRank({2: "c", 0: "a"})
    assert values.ranks == (0, 2) and values.first == "a"


def test_ranks_for_which_nothing_is_found_are_left_out() -> None:
    values = ByRank({0: "a", 1: "b", 2: "c"})
    assert dict(values.found({"a": 1, "c": 3}.get)) == {0: 1, 2: 3}
    assert dict(values.where(lambda value: value > "a").without([2])) == {1: "b"}


def test_of_groups_of_one_size_that_with_the_lowest_rank_is_not_the_odd_one() -> None:
    values = ByRank({0: "b", 1: "a", 2: "a", 3: "b"})
    assert values.groups(itself) == ((0, 3), (1, 2))
    assert values.unlike_most(itself) == (1, 2)


def test_without_a_majority_no_rank_is_unlike_it() -> None:
    assert ByRank({0: "a", 1: "b"}).unlike_majority(itself) == ()
    assert ByRank({0: "a", 1: "b", 2: "b"}).unlike_majority(itself) == (0,)


def test_what_holds_of_all_ranks_sets_none_apart() -> None:
    values = ByRank({0: "a", 1: "b"})
    assert values.some(lambda value: value == "b") == (1,)
    assert values.some(str.isalpha) == ()


def test_values_differ_unless_all_are_one() -> None:
    assert ByRank({0: "a", 1: "b"}).differ(itself)
    assert not ByRank({0: "a", 1: "a"}).differ(itself)


def test_sides_are_the_groups_with_what_they_have() -> None:
    values = ByRank({0: "b", 1: "a", 2: "a"})
    assert values.sides() == [((1, 2), "a"), ((0,), "b")]
    assert values.among([0, 1]).sides() == [((0,), "b"), ((1,), "a")]
