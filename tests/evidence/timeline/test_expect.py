"""Events so far -> what comes next: the longest context that occurred before, and its continuation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tpcompile.evidence.timeline.expect import contexts_before, due_after, num_equal, replayed

EVENTS = st.text("abc", max_size=40)


def next_of(past: str, num: int) -> str:
    return "".join(past[index] for index in replayed(past, num))


def test_a_loop_goes_on() -> None:
    assert next_of("abcabca", 5) == "bcabc"


def test_an_inner_loop_ends_when_it_did_before() -> None:
    assert next_of("aabaab" + "aa", 4) == "baab"


def test_every_second_step_is_known_after_two_of_them() -> None:
    assert next_of("axb" + "ab" + "axb" + "ab" + "a", 5) == "xbaba"


def test_nothing_is_known_after_something_new() -> None:
    assert replayed("abcd", 3) == [] and due_after("abcd") == set()


def test_where_equal_contexts_led_to_several_events_all_are_due() -> None:
    assert due_after("xab" + "yac" + "za") == {"b", "c"}


@given(EVENTS)
def test_contexts_are_those_of_a_plain_search(past: str) -> None:
    searched = [num_equal(past[:index][::-1], past[::-1]) for index in range(len(past))]
    assert contexts_before(past) == searched


@given(EVENTS, st.integers(0, 20))
def test_a_replay_in_two_parts_is_the_same(past: str, num: int) -> None:
    once = next_of(past, num + 1)
    assert once == "" or next_of(past, num) == once[:-1]
