"""A store that does not answer, and a rank that waits or goes on -> whether its node is cut off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.sentinel.test_hang import issued, state
from tpcompile.evidence.records.causes import Cause
from tpcompile.ranks.store import Line
from tpcompile.sentinel.reach import Reach, cut_off


@contextmanager
def unanswered(line: Line) -> Iterator[None]:
    """A thread asks the store, and gets no answer."""
    is_asking, is_over = threading.Event(), threading.Event()

    def ask() -> None:
        with line.asking():
            is_asking.set()
            is_over.wait()

    thread = threading.Thread(target=ask)
    thread.start()
    is_asking.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def reach(line: Line, places: list[object | None]) -> Reach:
    """Of a rank that waits in the last of these places."""
    return Reach(line, limit_s=6.0, place=lambda: places[-1], lost=lambda _: None)


def test_a_rank_that_waits_while_the_store_is_silent_is_cut_off_for_that_long() -> None:
    line = Line()
    found = reach(line, ["all_reduce #3"])
    with unanswered(line):
        asked_at_s = line.silent_since()
        assert asked_at_s is not None
        assert found.silent_s(asked_at_s + 1.0) == 0.0
        assert found.silent_s(asked_at_s + 8.0) == pytest.approx(7.0)


def test_a_thread_that_was_closed_has_ended_also_where_it_never_began_or_closes_itself() -> None:
    before = threading.active_count()
    reach(Line(), [None]).close()
    found = reach(Line(), [None])
    found.start()
    found.close()
    assert threading.active_count() == before
    alone = Reach(Line(), limit_s=0.0, place=lambda: None, lost=lambda _: (alone.close(), closed.set()))
    closed = threading.Event()
    alone.start()
    assert closed.wait(10)


@pytest.mark.parametrize("then", ["all_reduce #4", None])
def test_a_rank_that_goes_on_is_not(then: str | None) -> None:
    line, places = Line(), ["all_reduce #3"]
    found = reach(line, places)
    with unanswered(line):
        begins_s = line.silent_since() or 0.0
        found.silent_s(begins_s + 1.0)
        places.append(then)
        assert found.silent_s(begins_s + 8.0) == 0.0


def test_a_store_that_answers_again_was_not_out_of_reach() -> None:
    line = Line()
    found = reach(line, ["all_reduce #3"])
    with unanswered(line):
        assert line.silent_since() is not None
    assert line.silent_since() is None
    assert found.silent_s(1e9) == 0.0


def test_a_question_that_fails_is_no_answer_and_the_next_answer_counts() -> None:
    line = Line()
    with pytest.raises(RuntimeError, match="reset"), line.asking():
        raise RuntimeError("connection reset")
    assert line.silent_since() is not None
    with line.asking():
        pass
    assert line.silent_since() is None


def test_a_line_that_is_given_up_asks_no_more() -> None:
    line = Line()
    line.give_up("node-a is unreachable")
    with pytest.raises(RuntimeError, match="node-a"), line.asking():
        pytest.fail("it asked")


def test_the_finding_names_the_host_of_the_store_and_the_ranks_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "node-a", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    waiting = issued(1, done=False)
    here = state(2, waiting).model_copy(update={"members": {waiting.group: (0, 1, 2, 3)}})
    found = cut_off(here, silent_s=62.0)
    assert (found.cause, found.ranks) == (Cause.STOPPED_RESPONDING, (0, 1))
    assert "node-a" in found.observed
    assert "(62 s)" in found.observed
    beside_rank_0 = cut_off(here.model_copy(update={"rank": 0}), silent_s=62.0)
    assert beside_rank_0.ranks == (2, 3)
    assert "node-a" not in beside_rank_0.observed
