"""Several texts as one line."""

from __future__ import annotations

from tpcompile.evidence.text.phrases import listed, phrase


def test_of_many_texts_the_first_few_are_shown_each_once() -> None:
    assert listed(["8 -> 9", "8 -> 9", "9 -> 10"], by=", ", at_most=2) == "8 -> 9, 9 -> 10"
    assert listed("abcd", by=" / ", at_most=2) == "a / b and 2 more"


def test_a_part_without_text_is_left_out() -> None:
    assert phrase("C/first", "", "forward model.py:3") == "C/first, forward model.py:3"
