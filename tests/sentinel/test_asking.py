"""A rank that waits long logs for which ranks, at growing intervals; a rank that compiles waits for none."""

from __future__ import annotations

import re

import pytest

from tests.sentinel.test_hang import issued, line, state
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.asking import Asking, Limits
from tpcompile.sentinel.events import Absence, Answers
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.progress import COMPILING, Progress


def asking() -> Asking:
    """A rank of two that saw nothing move since the start."""
    one = Asking(0, Limits(), Progress(lambda _: None))
    one.notices(0.0)
    return one


def test_a_rank_that_waits_names_the_rank_it_waits_for() -> None:
    states = {0: state(0, blocked=True), 1: state(1, activity=COMPILING, compile_id="0/0")}
    news = asking().news(states, 12.0)
    assert "12 of 3600 s" in news and "0/0" in news


def test_a_rank_that_compiles_itself_does_not_say_that_it_waits() -> None:
    states = {rank: state(rank, activity=COMPILING, compile_id="0/0") for rank in range(2)}
    assert asking().news(states, 12.0) == ""


def test_a_short_wait_is_not_logged_and_a_long_one_at_growing_intervals() -> None:
    states = {0: state(0, blocked=True), 1: state(1, activity=COMPILING, compile_id="0/0")}
    one = asking()
    assert [bool(one.news(states, now_s)) for now_s in (5.0, 12.0, 13.0, 30.0)] == [False, True, False, True]


def why(now_s: float, *others: RankState, limit_s: float = 4.0) -> Finding | None:
    """What rank 0 finds that may wait so long, and has waited since the start."""
    one = Asking(0, Limits(skew_limit_s=limit_s), Progress(lambda _: None))
    one.notices(0.0)
    waited = issued(1, done=False).model_copy(update={"age_s": now_s})
    states = {0: state(0, waited, blocked=True), **{other.rank: other for other in others}}
    return one.why_stuck(Answers(now_s, states, {}, {}))


def test_a_rank_that_does_not_come_in_time_is_named_where_it_is() -> None:
    assert why(3.9, state(1)) is None
    found = why(4.1, state(1))
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.NEVER_ARRIVED, (1,), line(21))


def asked(one: Asking, now_s: float, seq: int, age_s: float) -> Finding | None:
    """What rank 0 finds that waits in this collective now, in a program without compiled regions."""
    waiting = issued(seq, done=False).model_copy(update={"age_s": age_s})
    states = {0: state(0, waiting, blocked=True), 1: state(1)}
    found = one.why_stuck(Answers(now_s, states, {}, {}))
    return found if found is not None or not one.news(states, now_s) else Finding(Cause.UNKNOWN, "news", (), None)


def test_a_program_without_compiled_regions_has_not_waited_since_it_began() -> None:
    """Ten hours of steps, of which a look finds one in a collective now and then."""
    one = Asking(0, Limits(), Progress(lambda _: None))
    one.notices(0.0)
    for hour in range(1, 11):
        assert asked(one, 3600.0 * hour, seq=1000 * hour, age_s=4.0) is None
    last_s = 3600.0 * 10
    assert asked(one, last_s + 3590.0, seq=10000, age_s=3594.0) is not None  # it says that it waits
    found = asked(one, last_s + 3600.0, seq=10000, age_s=3604.0)
    assert found is not None and (found.cause, found.ranks) == (Cause.NEVER_ARRIVED, (1,))


def test_where_all_ranks_of_a_domain_wait_those_next_to_the_late_one_say_so_first() -> None:
    waiting = state(1, issued(1, done=False), blocked=True)
    assert why(5.9, waiting) is None
    found = why(6.1, waiting)
    assert found is not None
    assert (found.cause, found.ranks) == (Cause.NEVER_ARRIVED, ()) and "rank 1" in found.observed


def test_when_somebody_ends_the_job_the_rank_that_has_not_come_is_named() -> None:
    """One that also waits, or a wait that has only begun, says nothing: the ranks go on."""
    here, there = state(0, issued(1, done=False), blocked=True), state(1)
    found = asking().waited_for(ByRank({0: here, 1: there}), 5.0)
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.NEVER_ARRIVED, (1,), line(21))
    waits = state(1, issued(1, done=False), blocked=True)
    healthy = [(here, there, 2.0), (here, waits, 5.0), (state(0), there, 5.0)]
    assert [asking().waited_for(ByRank({0: one, 1: other}), now_s) for one, other, now_s in healthy] == [None] * 3


def given_up_after(how: str, limits: Limits) -> float:
    """Seconds until rank 0 gives up a rank that stopped answering at once."""
    one = Asking(0, limits, Progress(lambda _: None))
    one.notices(0.0)
    states = {0: state(0, issued(1, done=False), blocked=True)}
    for now_s in range(200):
        found = one.why_stuck(Answers(float(now_s), states, {1: Absence(how)}, {}))
        if found is not None:
            assert (found.cause, found.gone) == (Cause.STOPPED_RESPONDING, (1,))
            return now_s
    raise AssertionError("never given up")


@pytest.mark.parametrize(("how", "limit_s"), [("stopped", 7.0), ("alive", 9.0), ("unknown", 9.0)])
def test_a_rank_that_is_stopped_and_one_that_is_silent_have_limits_of_their_own(how: str, limit_s: float) -> None:
    assert given_up_after(how, Limits(stopped_s=7.0, unresponsive_s=9.0)) == limit_s


@pytest.mark.parametrize("how", ["stopped", "alive"])
def test_by_default_a_debugger_may_stop_a_rank_for_half_a_minute(how: str) -> None:
    assert given_up_after(how, Limits()) >= 45


def test_they_are_given_a_minute_at_most_and_where_no_rank_answers_nothing() -> None:
    waiting = state(1, issued(1, done=False), blocked=True)
    assert why(3659.0, waiting, limit_s=3600.0) is None
    assert why(3661.0, waiting, limit_s=3600.0) is not None
    alone = why(4.1)
    assert alone is not None and re.search("no other .*answers", alone.observed)
