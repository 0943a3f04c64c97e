"""The fields of a parting: the last common event, sides and where they begin, what is due, which content differs."""

from __future__ import annotations

import pytest

from tests.evidence.timeline.written import stream
from tpcompile.evidence.timeline import tracks
from tpcompile.evidence.timeline.align import align
from tpcompile.evidence.timeline.parting import Edit, Parting
from tpcompile.evidence.timeline.stream import Kind, Stream

EVERYONE = {"world": (0, 1, 2)}


def streams(*texts: str) -> dict[int, Stream]:
    return {rank: stream(rank, text, EVERYONE) for rank, text in enumerate(texts)}


def parted(*texts: str) -> Parting:
    parting = align(streams(*texts))
    assert parting is not None
    return parting


def test_sides_have_what_each_went_on_with() -> None:
    parting = parted("i5 a10 a11 a12*", "i5 a10 a11 a12*", "i5 a10 a13*")
    assert parting.before and parting.before.place == (("/home/me/train.py", 10),)
    assert [side.ranks for side in parting.sides] == [(0, 1), (2,)]
    assert [[event.stack[-1].line for event in side.events] for side in parting.sides] == [[11, 12], [13]]
    assert parting.starts == {0: 2, 1: 2, 2: 2}
    assert (parting.usual_side, parting.odd_side) == parting.sides


def test_a_rank_that_has_not_come_there_is_on_no_side() -> None:
    parting = parted("i5 a10 a11*", "i5", "i5 a10 a12*")
    assert parting.starts == {0: 2, 2: 2}


def test_a_side_begins_with_the_call_of_its_compiled_code() -> None:
    parting = parted("i5 c10=f a10.40@f1*", "i5 c10=f a10.40@f1*", "i5 c20=g a20.50@g1*")
    assert [side.event.kind for side in parting.sides] == [Kind.CALL, Kind.CALL]
    assert (parting.starts, parting.line and parting.line.line) == ({0: 1, 1: 1, 2: 1}, 10)


def test_ranks_that_part_within_a_call_do_not_part_at_it() -> None:
    parting = parted("c10=f a10.40@f1 a10.41@f1*", "c10=f a10.40@f1 a10.41@f1*", "c10=f a10.40@f1 a10.42@f1*")
    assert parting.starts == {0: 2, 1: 2, 2: 2}
    assert parting.line and parting.line.line == 41


def test_the_line_is_in_the_function_in_which_all_were() -> None:
    left_out = parted("i5 a20.30 a20.31*", "i5 a20.30 a20.31*", "i5 a20.30 a21*")
    assert (left_out.edit, left_out.line and left_out.line.line) == (Edit.LEFT_OUT, 31)


def test_what_is_due_is_what_the_usual_ranks_did_and_then_the_past() -> None:
    parting = parted("i5 a10 a11 i5 a10*", "i5 a10 a11 i5 a10*", "i5 a10 a11 i5 a11*")
    assert [event.stack[-1].line for event in parting.due[:5]] == [10, 11, 5, 10, 11]


def test_fields_are_those_whose_content_differs() -> None:
    assert parted("i5 a10:4*", "i5 a10:4*", "i5 a10:8*").fields == ("what",)
    assert parted("i5 a10*", "i5 a10*", "i5 a11*").fields == ()


def test_a_call_with_different_content_follows_what_was_done_before_it() -> None:
    parting = parted(*["(i5 c8=f:0 a8.40@f1)x2 i5 c8=f:0"] * 2, "(i5 c8=f:0 a8.40@f1)x2 i5 c8=f:1")
    assert (parting.edit, parting.odd, parting.starts[2]) == (Edit.CONTENT, (2,), 7)
    assert parting.before and parting.before.kind == Kind.ITERATION


def learner_and_actors(actor_2: str) -> dict[int, Stream]:
    """Rank 0 receives from the others, and broadcasts to them from a line of its own; `actor_2` ends rank 2."""
    texts = ("(a10 <1@11 <2@12)x4 a10 <1@11 <2@12*", "(a20 >0@21)x5 a20*", f"(a20 >0@21)x4 {actor_2}")
    return streams(*texts)


def test_ranks_with_roles_of_their_own_part_where_one_leaves_its_role() -> None:
    parting = align(learner_and_actors("a20 a20*"))
    assert parting is not None and parting.usual is not None
    assert (parting.odd, parting.edit, parting.usual.kind) == ((2,), Edit.LEFT_OUT, Kind.SEND)
    assert parting.left_out is not None and parting.left_out.line == 21


def test_ranks_with_roles_that_all_go_on_have_not_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for one program, the negative control, they would have parted at the first broadcast."""
    healthy = learner_and_actors("a20 >0@21*")
    assert align(healthy) is None
    monkeypatch.setattr(tracks, "_FEW_MET", 99)
    assert align(healthy) is not None


def aborted(found: Stream) -> Stream:
    """The rank aborted in its last collective: its sizes do not fit, and are not known."""
    *before, last = found.events
    return found.changed(events=(*before, last.changed(content={}, is_unlike=True)))


@pytest.mark.parametrize(
    ("sizes", "odd"), [(("4", "4", "4"), (3,)), (("4", "4", "3"), ()), (("4", "4"), ())], ids=["equal", "own", "few"]
)
def test_the_same_sizes_on_several_ranks_are_no_sizes_of_their_own(
    sizes: tuple[str, ...], odd: tuple[int, ...]
) -> None:
    """Each may have its own, as in an `all_gather` into a list; one rank aborted in it, and two may agree by chance."""
    known = streams(*["i5 a10 a11*"] * (len(sizes) + 1))
    world = {"world": tuple(known)}
    found = {rank: one.changed(groups=world) for rank, one in known.items()}
    for rank, size in enumerate(sizes):
        *before, last = known[rank].events
        found[rank] = found[rank].changed(events=(*before, last.changed(own={"sizes": size})))
    found[len(sizes)] = aborted(found[len(sizes)])
    parting = align(found)
    assert parting is not None and parting.odd == odd


@pytest.mark.parametrize(("num_aborted", "odd"), [(1, (2,)), (2, ())])
def test_ranks_whose_content_nobody_knows_are_no_majority(num_aborted: int, odd: tuple[int, ...]) -> None:
    """Of three ranks that issue it with other sizes each, all but one may abort."""
    known = streams(*["i5 a10 a11*"] * 3)
    last = max(known)
    found = {rank: aborted(one) if rank > last - num_aborted else one for rank, one in known.items()}
    parting = align(found)
    assert parting is not None and parting.odd == odd
