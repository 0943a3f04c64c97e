"""A store that is silent, or gone, ends what asks it in time, and with the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tpcompile.errors import DivergenceError
from tpcompile.ranks.answered import while_answered
from tpcompile.ranks.store import LINE


def ask(answer: Callable[[], object]) -> object:
    """One request to the store."""
    with LINE.asking():
        return answer()


def test_what_is_answered_comes_back() -> None:
    assert while_answered(lambda: ask(lambda: 7), silent_s=5.0) == 7


def test_an_error_of_the_program_stays_what_it_is() -> None:
    with pytest.raises(KeyError, match="lost"):
        while_answered(lambda: {}["lost"], silent_s=5.0)


def test_a_store_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node-a")
    monkeypatch.setenv("MASTER_PORT", "29500")
    cable = threading.Event()
    try:
        with pytest.raises(DivergenceError, match=r"node-a:29500 .*0\.2 s"):
            while_answered(lambda: ask(cable.wait), silent_s=0.2)
    finally:
        cable.set()


def test_a_store_that_has_ended_is_named_with_torchs_reason() -> None:
    def refused() -> object:
        raise RuntimeError("connection refused")

    try:
        with pytest.raises(DivergenceError, match="connection refused"):
            while_answered(lambda: ask(refused), silent_s=5.0)
    finally:
        ask(lambda: None)  # the line of this process answers again


def test_the_late_answer_to_an_earlier_question_does_not_hide_that_the_store_has_ended() -> None:
    asked, answer, answered = threading.Event(), threading.Event(), threading.Event()

    def earlier() -> None:
        def wait() -> None:
            asked.set()
            answer.wait()

        ask(wait)
        answered.set()

    def refused_while_the_earlier_is_answered() -> object:
        try:
            ask(lambda: (_ for _ in ()).throw(RuntimeError("connection refused")))
        finally:
            answer.set()
            answered.wait()

    threading.Thread(target=earlier, daemon=True).start()
    asked.wait()
    try:
        with pytest.raises(DivergenceError, match="connection refused"):
            while_answered(refused_while_the_earlier_is_answered, silent_s=5.0)
    finally:
        ask(lambda: None)
