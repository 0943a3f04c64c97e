"""Numbers of collectives differ while no rank is stuck: the flight recorders show which collective it is."""

from __future__ import annotations

from tests.sentinel.test_hang import by_rank, issued, line, state
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel import events as ev
from tpcompile.sentinel.asking import Limits
from tpcompile.sentinel.counter_samples import COLLECTIVES, Counted
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.parted import parted
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.protocol import Protocol

COUNTER = f"{COLLECTIVES}0 default_pg"


def counted(*, one_more_from: int) -> dict[str, Counted]:
    """Twenty calls of one collective each, with one more from a call on."""
    samples = {call: {COUNTER: call + (call >= one_more_from)} for call in range(1, 21)}
    return {"f": Counted(region="f", stack=(line(10),), has_collectives=True, samples=samples)}


def steps(rank: int, *, at: int = 10, barrier_after: int | None = None, first: int = 1, num: int = 20) -> RankState:
    """Step by step one all-reduce of a line, and a barrier of line 30 after one of them; kept from a number on."""
    lines = [at] * num
    if barrier_after is not None:
        lines.insert(barrier_after, 30)
    ops = {30: "barrier"}
    numbered = [issued(seq, at=at, op=ops.get(at, "all_reduce")) for seq, at in enumerate(lines, start=1)]
    return state(rank, *numbered[first - 1 :])


def found_by(*states: RankState) -> Finding:
    protocol = Protocol(0, range(2), Progress(lambda _: None), Limits())
    protocol.progress.is_active = True
    compared = ev.Compared({}, {0: counted(one_more_from=99), 1: counted(one_more_from=9)})
    (asked,) = protocol.on(compared)
    assert isinstance(asked, ev.Ask)
    (raised,) = protocol.on(ev.Answers(1.0, by_rank(*states), {}))
    assert isinstance(raised, ev.RaiseFinding)
    return raised.finding


def test_the_collective_that_one_rank_added_is_named_with_its_line() -> None:
    found = found_by(steps(0), steps(1, barrier_after=8))
    assert (found.cause, found.ranks, found.line) == (Cause.STUCK_COLLECTIVE, (1,), line(30))


def test_where_no_rank_kept_it_the_region_is_named() -> None:
    found = found_by(steps(0, first=12), steps(1, barrier_after=8, first=12))
    assert (found.cause, found.ranks, found.line) == (Cause.CALL_COUNT, (1,), line(10))


def test_ranks_that_do_not_answer_leave_what_was_counted() -> None:
    assert found_by().cause == Cause.CALL_COUNT


def test_a_rank_that_leaves_does_not_ask_first() -> None:
    protocol = Protocol(0, range(2), Progress(lambda _: None), Limits())
    (raised,) = protocol.on(ev.Compared({}, {0: counted(one_more_from=99), 1: counted(one_more_from=9)}))
    assert isinstance(raised, ev.RaiseFinding)


def test_where_all_that_ranks_kept_differs_they_parted_before() -> None:
    assert parted(by_rank(steps(0, first=9), steps(1, at=40, first=9))) is None
    assert parted(by_rank(steps(0, num=2), steps(1, at=40, num=2))) is not None
    assert parted(by_rank(steps(0), steps(1, at=40))) is None, "each has a role of its own"
