"""Where ranks parted, by what they issued; and ranks that wait, or left, in the middle of it."""

from __future__ import annotations

from tests.sentinel.test_hang import AT, GROUP, by_rank, issued, line, state, stuck
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.messages import WAITING, Issued, PointToPoint, RankState
from tpcompile.sentinel.parted import parted
from tpcompile.sentinel.situation import Lost


def issued_from(rank: int, *lines: int) -> RankState:
    return state(rank, *(issued(number, at=at) for number, at in enumerate(lines, start=1)))


def called(seq: int, *, at: int = 10, region: str = "f", done: bool = True) -> Issued:
    """A collective of the first call of a region, which line 7 calls."""
    where = {"stack": (line(at), line(7)), "call_line": line(7), "region": region, "call": 1}
    return issued(seq, done=done).model_copy(update=where)


def test_the_rank_after_whose_past_something_else_used_to_follow_is_named() -> None:
    for odd in (0, 1):
        ranks = [issued_from(rank, 10, 20, 10, 10 if rank == odd else 20) for rank in range(2)]
        found = parted(by_rank(*ranks))
        assert found is not None and found.ranks == (odd,)


def test_one_call_that_is_compiled_on_one_rank_and_eager_on_the_other_is_no_parting() -> None:
    region = "f /home/me/train.py:10"
    ranks = [state(rank, called(1, at=at, region=region)) for rank, at in enumerate((10, 12))]
    assert parted(by_rank(*ranks)) is None
    both_eager = [state(rank, called(1, at=at, region=region)) for rank, at in enumerate((11, 12))]
    assert parted(by_rank(*both_eager)) is not None


def test_a_rank_that_left_lacks_the_call_that_the_other_one_waits_in() -> None:
    waiting = state(0, called(1), called(2, region="g", done=False), calls={"f": 2, "g": 1})
    found = stuck(by_rank(waiting, state(1, called(1), ended="finished", calls={"f": 1})))
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.CALL_COUNT, (1,), line(7))
    assert found.is_by_past, "of two ranks there is no majority"


def test_two_ranks_in_collectives_that_are_both_new_differ_when_one_of_them_died() -> None:
    states = by_rank(state(0, issued(1, at=10), issued(2, at=20), issued(3, done=False, at=88)))
    gone = Lost(1, "died", stack=(line(30),), aborted=True, is_final=True)
    found = stuck(states, gone, before={})
    assert found is not None
    assert (found.ranks, found.line) == ((0, 1), line(30))


def test_a_send_that_has_just_begun_may_end() -> None:
    receiver = state(1, issued(3, done=False))
    states = by_rank(state(0, p2p=PointToPoint(op="send", peer=1)), receiver)
    assert stuck(states, before=by_rank(state(0), receiver)) is None
    assert stuck(states) is not None


def test_a_collective_that_is_just_being_called_may_be_issued() -> None:
    calling = state(1, calling=GROUP, stack=(line(44),))
    states = by_rank(state(0, waits_at=AT, activity=WAITING), calling)
    assert stuck(states, before=by_rank(states[0], state(1, stack=(line(43),)))) is None
    assert stuck(states) is not None
