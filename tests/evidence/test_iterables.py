"""Several values or questions: the first that has an answer, what has nothing in common."""

from __future__ import annotations

from tpcompile.evidence.iterables import decided, find, first_answer, indexed, listed, unlike


def test_the_first_rule_that_holds_decides() -> None:
    rules = ((str.isdigit, "number"), (str.isalnum, "word"))
    assert decided(rules, "7", otherwise="text") == "number"
    assert decided(rules, "a7", otherwise="text") == "word"
    assert decided(rules, "a 7", otherwise="text") == "text"


def test_an_answer_that_is_false_is_an_answer() -> None:
    assert first_answer((lambda _: None, lambda _: 0, lambda _: 1), "anything") == 0


def test_of_values_with_one_key_the_last_is_kept() -> None:
    assert indexed(["aa", "b", "cc"], len) == {2: "cc", 1: "b"}


def test_values_with_anything_in_common_with_others_are_left_out() -> None:
    assert unlike(["a", "bb", "c"], ["x"], len) == ["bb"]


def test_the_first_value_that_holds_is_found_or_nothing() -> None:
    assert find(["a", "7", "8"], str.isdigit) == "7"
    assert find(["a"], str.isdigit) is None


def test_of_many_texts_the_first_few_are_shown_each_once() -> None:
    assert listed(["8 -> 9", "8 -> 9", "9 -> 10"], by=", ", at_most=2) == "8 -> 9, 9 -> 10"
    assert listed("abcd", by=" / ", at_most=2) == "a / b and 2 more"
