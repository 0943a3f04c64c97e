"""States of ranks -> streams: order over groups, what is known from where on, how a rank stands, lost ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.timeline.align import align
from tpcompile.evidence.timeline.parting import Edit, Why
from tpcompile.evidence.timeline.stream import How, Kind, Stream
from tpcompile.sentinel.messages import FINISHED, RUNNING, Issued, PointToPoint, RankState
from tpcompile.sentinel.situation import Lost
from tpcompile.sentinel.streams import stream_of, streams_of, timed_stream

GROUP, OTHER = "0 default_pg", "1 tp"


def line(number: int) -> UserLine:
    return UserLine(file="/home/me/train.py", line=number, function="step")


def issued(seq: int, at: int, age_s: float, *, done: bool = True, group: str = GROUP, **more: object) -> Issued:
    fields = {"op": "all_reduce", "sizes": "4x4", "dtypes": "Float", "stack": (line(at), line(5))} | more
    return Issued.model_validate({"group": group, "seq": seq, "is_done": done, "age_s": age_s, **fields})


def state(rank: int, *collectives: Issued, **more: object) -> RankState:
    fields = {"activity": RUNNING, "since_s": 4.0, "members": {GROUP: (0, 1), OTHER: (0, 1)}} | more
    return RankState.model_validate({"rank": rank, "issued": collectives, **fields})


def lines(stream: Stream) -> list[int]:
    return [event.stack[-1].line for event in stream.events]


def test_collectives_of_all_groups_are_in_the_order_in_which_they_were_issued() -> None:
    known = state(0, issued(1, 10, 9.0), issued(2, 12, 7.0), issued(1, 11, 8.0, group=OTHER))
    assert lines(stream_of(known)) == [10, 11, 12]
    assert stream_of(known).is_whole


def test_each_event_has_the_time_at_which_it_was_issued() -> None:
    timed = timed_stream(state(0, issued(1, 5, 3.0), issued(2, 7, 1.0, done=False)), now=100.0)
    assert list(zip(lines(timed.stream), timed.times, strict=True)) == [(5, 97.0), (7, 99.0)]
    assert timed.until == 100.0


def test_the_order_is_known_from_where_all_groups_are() -> None:
    known = state(0, issued(90, 10, 7.0), issued(91, 12, 6.0), issued(1, 11, 50.0, group=OTHER))
    assert lines(stream_of(known)) == [10, 12]
    assert not stream_of(known).is_whole


def test_sizes_that_may_differ_are_the_ranks_own() -> None:
    one, other = stream_of(state(0, issued(1, 10, 9.0), issued(2, 11, 8.0, op="alltoall"))).events
    assert (one.content, one.own) == ({"sizes": "4x4", "dtypes": "Float"}, {})
    assert (other.content, other.own) == ({}, {"sizes": "4x4", "dtypes": "Float"})


def test_the_first_collective_of_a_call_follows_the_call() -> None:
    inside = {"stack": (line(40), line(10), line(5)), "call_line": line(10), "region": "f"}
    known = state(0, issued(1, 40, 9.0, call=1, **inside), issued(2, 41, 8.0, call=1, **inside), issued(3, 12, 7.0))
    events = stream_of(known).events
    assert [event.kind for event in events] == [Kind.CALL, Kind.COLLECTIVE, Kind.COLLECTIVE, Kind.COLLECTIVE]
    assert (events[0].name, events[0].number, events[0].stack) == ("f", 1, (line(5), line(10)))


def test_a_rank_waits_in_what_has_not_ended() -> None:
    assert stream_of(state(0, issued(1, 10, 9.0, done=False))).how == How.WAITING
    assert stream_of(state(0, issued(1, 10, 9.0))).how == How.RUNNING
    received = stream_of(state(0, p2p=PointToPoint(op="recv", peer=1, line=line(7))))
    assert (received.events[-1].kind, received.events[-1].peer, received.how) == (Kind.RECEIVE, 1, How.WAITING)


def test_how_a_rank_ended() -> None:
    ends = [FINISHED, "SystemExit: 0", "ValueError: no"]
    assert [stream_of(state(0, ended=end)).how for end in ends] == [How.FINISHED, How.EXITED, How.RAISED]


def steps(*last: Issued) -> tuple[Issued, ...]:
    """Three steps of two collectives, and what follows them."""
    known = [issued(number, 10 + number % 2, 20.0 - number) for number in range(1, 7)]
    return (*known, *last)


def died(rank: int, *at: int) -> Lost:
    return Lost(rank, "died", stack=tuple(map(line, at)), aborted=bool(at), is_final=True)


def test_a_rank_that_aborted_is_in_the_collective_in_which_the_others_wait() -> None:
    waiting = state(0, *steps(issued(7, 11, 4.0, done=False)))
    streams = streams_of({0: waiting}, {1: died(1, 5, 10)})
    assert [(event.number, event.is_done) for event in streams[1].events] == [(7, False)]
    parting = align(streams)
    assert parting is not None
    assert (parting.odd, parting.why, parting.edit) == ((1,), Why.OWN_PAST, Edit.LEFT_OUT)
    assert parting.line == line(11)


def test_a_rank_that_aborted_at_the_same_line_had_content_that_does_not_fit() -> None:
    waiting = state(0, *steps(issued(7, 11, 4.0, done=False)))
    streams = streams_of({0: waiting}, {1: died(1, 5, 11)})
    assert streams[1].events[0].content == {}, "what rank 0 sent is no evidence of what rank 1 did"
    parting = align(streams)
    assert parting is not None
    assert (parting.edit, parting.odd, parting.line) == (Edit.UNDECIDED, (), line(11))
    (fields,) = parting.fields
    assert re.match("sizes, dtypes .*split", fields)


@pytest.mark.parametrize(("sizes", "known"), [("4x4", {"sizes": "4x4", "dtypes": "Float"}), ("8x4", {})])
def test_what_an_aborted_rank_sent_is_known_only_where_all_others_sent_the_same_there(
    sizes: str, known: dict[str, str]
) -> None:
    waiting = steps(issued(7, 11, 4.0, done=False))
    other = [one.model_copy(update={"sizes": sizes}) if one.place == waiting[1].place else one for one in waiting]
    states = {0: state(0, *waiting), 2: state(2, *other)}
    event = streams_of(states, {1: died(1, 5, 10)})[1].events[0]
    assert event.content == known


def test_a_rank_that_left_earlier_is_known_by_its_own_past() -> None:
    waiting = state(0, *steps(issued(7, 10, 4.0), issued(8, 30, 3.0, done=False)))
    parting = align(streams_of({0: waiting}, {1: died(1, 5, 10)}))
    assert parting is not None
    assert (parting.odd, parting.why) == ((0,), Why.OWN_PAST)


def test_a_killed_rank_took_part_in_what_has_ended() -> None:
    waiting = state(0, *steps(issued(7, 11, 4.0, done=False)))
    streams = streams_of({0: waiting}, {1: died(1)})
    assert (len(streams[1].events), streams[1].how) == (6, How.KILLED)
    parting = align(streams)
    assert parting is not None
    assert (parting.odd, parting.edit, parting.line) == ((1,), Edit.ENDED, line(11))


def test_a_rank_that_may_live_has_no_stream() -> None:
    waiting = state(0, *steps(issued(7, 11, 4.0, done=False)))
    assert set(streams_of({0: waiting}, {1: Lost(1, "stopped")})) == {0}


def program() -> None:
    for _ in range(9):
        print("step")  # again
        print("more")  # inside
    print("end")  # after


def own_line(text: str) -> UserLine:
    lines = Path(__file__).read_text().splitlines()
    number = next(at for at, one in enumerate(lines, start=1) if one.endswith(f"# {text}"))
    return UserLine(file=__file__, line=number, function="program")


@pytest.mark.parametrize(("other", "odd"), [("inside", (1,)), ("after", ())])
def test_a_line_in_the_body_of_the_loop_is_no_end_of_it(other: str, odd: tuple[int, ...]) -> None:
    """The source of what this process has imported shows where a loop ends; steps alone do not."""
    again = {"stack": (own_line("again"),)}
    steps = [issued(number, 1, 20.0 - number, **again) for number in (1, 2, 3)]
    ways = [issued(4, 1, 4.0, done=False, **again), issued(4, 1, 4.0, done=False, stack=(own_line(other),))]
    parting = align(streams_of({rank: state(rank, *steps, way) for rank, way in enumerate(ways)}, {}))
    assert parting is not None
    assert parting.odd == odd


def test_a_file_that_only_a_peer_names_is_not_read() -> None:
    (event,) = stream_of(state(0, issued(1, 10, 9.0))).events
    assert event.loops == ()
    (event,) = stream_of(state(0, issued(1, 1, 9.0, stack=(own_line("again"),)))).events
    assert event.loops == ((own_line("again").line - 1, own_line("inside").line),)
