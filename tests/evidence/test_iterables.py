"""Several values or questions: the first that has an answer, what has nothing in common."""

from __future__ import annotations

from tpcompile.evidence.iterables import find, first_answer, indexed, majority, unlike


def test_an_answer_that_is_false_is_an_answer() -> None:
    assert first_answer((lambda _: None, lambda _: 0, lambda _: 1), "anything") == 0


def test_of_values_with_one_key_the_last_is_kept() -> None:
    assert indexed(["aa", "b", "cc"], len) == {2: "cc", 1: "b"}


def test_values_with_anything_in_common_with_others_are_left_out() -> None:
    assert unlike(["a", "bb", "c"], ["x"], len) == ["bb"]


def test_the_first_value_that_holds_is_found_or_nothing() -> None:
    assert find(["a", "7", "8"], str.isdigit) == "7"
    assert find(["a"], str.isdigit) is None


def test_a_majority_is_more_than_half_of_all_members() -> None:
    assert majority([(0,), (1, 2)]) == (1, 2)
    assert majority([(0, 3), (1, 2)]) is None
    assert majority([(0,), (1, 2)], of=4) is None, "a member that is not seen may be of either group"
    assert majority([]) is None
