"""Collectives of a rank, in order: where it deviates from its own earlier sequence."""

from __future__ import annotations

from tpcompile.sentinel.messages import Key
from tpcompile.sentinel.own_sequence import surprise


def keys(text: str) -> list[Key]:
    return [(letter, ()) for letter in text]


def surprise_at_the_end(text: str) -> int:
    return surprise(keys(text), len(text) - 1, range(len(text) - 1))


def test_what_used_to_follow_is_no_surprise() -> None:
    assert surprise_at_the_end("abcabc") == 0


def test_what_is_new_surprises_by_as_much_as_came_before_it_as_ever() -> None:
    assert surprise_at_the_end("abcabd") == 2


def test_where_nothing_is_known_nothing_surprises() -> None:
    assert surprise_at_the_end("abcd") == surprise_at_the_end("a") == 0


def test_the_longest_common_past_says_what_is_usual() -> None:
    assert surprise_at_the_end("xabc" + "yabd" + "xabd") == 3
    assert surprise_at_the_end("xabc" + "yabd" + "xabc") == 0
