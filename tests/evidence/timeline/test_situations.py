"""What each rank did -> where they parted, who left the program, and why: situations as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tests.evidence.timeline.written import stream
from tpcompile.evidence.timeline.align import align, left_out_alone
from tpcompile.evidence.timeline.parting import Edit, Parting, Why
from tpcompile.evidence.timeline.stream import How

OUT, ADDED, INSTEAD, ENDED = Edit.LEFT_OUT, Edit.ADDED, Edit.INSTEAD, Edit.ENDED
CONTENT, OPEN = Edit.CONTENT, Edit.UNDECIDED
MOST, PAST, END, NONE = Why.MAJORITY, Why.OWN_PAST, Why.END, Why.NONE


@dataclass(frozen=True)
class Case:
    """One situation; `said` is (edit, odd ranks, why, line), None where nothing parts."""

    name: str
    ranks: tuple[str, ...]
    said: tuple[Edit, tuple[int, ...], Why, int | None] | None
    how: Mapping[int, How] = field(default_factory=dict)
    first: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Numbers of the first events of ranks whose streams are cut at the front."""
    some: tuple[int, ...] = (0, 1)
    """Ranks of the group `some`."""
    domains: tuple[tuple[int, ...], ...] = ()


STEP = "i5 a10 a11 a12"
CASES = (
    Case("one of three leaves a collective out", ("i5 a10 a11*", "i5 a10 a11*", "i5 a10 a12*"), (OUT, (2,), MOST, 11)),
    Case("one of two leaves one out", (f"({STEP})x3 i5 a10 a11*", f"({STEP})x3 i5 a10 a12*"), (OUT, (1,), PAST, 11)),
    Case("two ranks without a past", ("i5 a10*", "i5 a11*"), (OPEN, (), NONE, 11)),
    Case(
        "one of two issues one more",
        ("(i5 a10 a12)x3 i5 a10 a12*", "(i5 a10 a12)x3 i5 a10 a11.20*"),
        (INSTEAD, (1,), PAST, 11),
    ),
    Case(
        "one more, and it goes on",
        (f"({STEP})x3 i5 a10 a11 a12", f"({STEP})x3 i5 a10 a20 a11 a12*"),
        (ADDED, (1,), PAST, 20),
    ),
    Case(
        "one round of an inner loop more",
        ("(i5 (a10 a11)x2 a12)x2 i5 (a10 a11)x2 a12*", "(i5 (a10 a11)x2 a12)x2 i5 (a10 a11)x2 a10*"),
        (ADDED, (1,), PAST, 10),
    ),
    Case(
        "one round of an inner loop less",
        ("(i5 (a10 a11)x3 a12)x2 i5 (a10 a11)x2 a10*", "(i5 (a10 a11)x3 a12)x2 i5 (a10 a11)x2 a12*"),
        (OUT, (1,), PAST, 10),
    ),
    Case(
        "a step skipped, whose collectives are those of the next one",
        ("(i5 a10 a11)x3 i5 a10 a11 i5 a10 a11 a30*", "(i5 a10 a11)x3 i5 i5 a10 a11 a30*"),
        (OUT, (1,), PAST, 10),
    ),
    Case(
        "the rest of a step skipped",
        ("(i5 a10 a11)x3 i5 a10 a11 i5 a10", "(i5 a10 a11)x3 i5 a10 i5 a10"),
        (OUT, (1,), PAST, 11),
    ),
    Case("a loop ends for the first time", ("(i5 a10)x4 i5 a10*", "(i5 a10)x4 a20*"), (OPEN, (), NONE, 20)),
    Case(
        "a loop ends as it did before",
        ("((a10)x3 a20)x2 (a10)x3 a20*", "((a10)x3 a20)x2 (a10)x3 a10*"),
        (ADDED, (1,), PAST, 10),
    ),
    Case(
        "a rank ends and the other one goes on",
        ("(i5 a10)x4 i5 a10*", "(i5 a10)x4"),
        (ENDED, (1,), END, 5),
        {1: How.FINISHED},
    ),
    Case(
        "a rank exits in a step",
        (f"({STEP})x3 i5 a10*", f"({STEP})x3 i5 e6.30"),
        (ENDED, (1,), PAST, 30),
        {1: How.EXITED},
    ),
    Case(
        "a rank is killed", (f"({STEP})x3 i5 a10 a11*", f"({STEP})x3 i5 a10"), (ENDED, (1,), PAST, 11), {1: How.KILLED}
    ),
    Case(
        "gloo aborts the rank that is right",
        (f"({STEP})x3 i5 a10:4*", f"({STEP})x3 i5 a12:8*", f"({STEP})x3 i5 a10:4*"),
        (OUT, (1,), MOST, 10),
        {0: How.ABORTED, 2: How.RAISED},
    ),
    Case("a rank aborts in what all are in", ("i5 a10*", "i5 a10*"), None, {0: How.ABORTED}),
    Case("sizes of one rank", ("(i5 a10:4)x3 i5 a10:4*", "(i5 a10:4)x3 i5 a10:8*"), (CONTENT, (1,), PAST, 10)),
    Case("sizes that are new on both", ("i5 a10:4 i5 a10:5*", "i5 a10:4 i5 a10:6*"), (OPEN, (), NONE, 10)),
    Case(
        "another variant of compiled code, and nothing stands still",
        ("(i5 c8=f:0 a8.40)x4", "(i5 c8=f:0 a8.40)x3 i5 c8=f:1 a8.40"),
        (CONTENT, (1,), PAST, 8),
    ),
    Case(
        "a collective of some ranks is left out, the other ranks wait for both",
        ("(a10 s11)x3 a10 s11*", "(a10 s11)x3 a10 a10*", "(a10)x4 a10*", "(a10)x4 a10*"),
        (OUT, (1,), PAST, 11),
    ),
    Case(
        "two groups in the opposite order, and both wait",
        ("(a10 t11)x3 a10*", "(a10 t11)x3 t11*"),
        (OUT, (1,), PAST, 10),
    ),
    Case(
        "rings that begin at different events",
        ("a11 a12 (i5 a10 a11 a12)x2 i5 a10 a11*", "a12 (i5 a10 a11 a12)x2 i5 a10 a12*"),
        (OUT, (1,), PAST, 11),
        first={0: {"world": 101, "i": 40}, 1: {"world": 102, "i": 40}},
    ),
    Case(
        "rings that begin after the ranks parted",
        ("a11 a12 (i5 a10 a11 a12)x2", "a12 (i5 a10 a11 a12)x2 i5*"),
        (OPEN, (), NONE, None),
        first={0: {"world": 101, "i": 40}, 1: {"world": 101, "i": 40}},
    ),
    Case(
        "rings in step by their collectives, in different iterations",
        ("(i5 a10 a11)x2 a30*", "(i5 a10 a11)x2 i5*", "(i5 a10 a11)x2 i5*"),
        (OPEN, (0,), MOST, None),
        first={0: {"world": 101, "i": 41}, 1: {"world": 101, "i": 40}, 2: {"world": 101, "i": 40}},
    ),
    Case("a message that is not sent", ("(a10 >1@11)x3 a10 a10*", "(a10 <0@21)x3 a10 <0@21*"), (OUT, (0,), PAST, 11)),
    Case("one that is not received", ("(a10 >1@11)x3 a10 >1@11*", "(a10 <0@21)x3 a10 a10*"), (OUT, (1,), PAST, 21)),
    Case(
        "a message of another size",
        ("(>1@11:16 a10)x3 >1@11:16 a10*", "(<0@21:16 a10)x3 <0@21:8*"),
        (CONTENT, (1,), PAST, 21),
    ),
    Case(
        "messages in both directions, in opposite orders, and one rank leaves out both",
        ("(>1@11 <1@12 a10)x3 >1@11* <1@12*", "(<0@22 >0@21 a10)x3 a10*"),
        (OUT, (1,), PAST, 22),
    ),
    Case(
        "stages of a pipeline that meet in different collectives",
        ("(>1@11 a15)x3 >1@11 a15*", "(<0@21 a25)x3 <0@21 a25:8*"),
        (CONTENT, (1,), PAST, 25),
        domains=((0,), (1,)),
    ),
    Case(
        "ranks with a line of their own in each step, and one leaves something out",
        ("(i5 a10 a12 a13)x3 i5 a10 a12 a13*", "(i5 a11 a12 a13)x3 i5 a11 a13*"),
        (OUT, (1,), PAST, 12),
    ),
    # healthy ones
    Case("a branch with a line of its own on each rank", ("(i5 a10 a12)x3 i5 a10*", "(i5 a11 a12)x3 i5 a11*"), None),
    Case("a rank that is behind", ("i5 a10 a11", "i5 a10*"), None),
    Case("all ended", ("i5 a10", "i5 a10"), None, {0: How.FINISHED, 1: How.FINISHED}),
    Case("some ranks have a collective of their own", ("a10 s11 a10*", "a10 s11 a10*", "a10 a10*"), None),
    Case("rank 0 calls compiled code for itself", ("i5 c8=f:0 c9=f:0 a10", "i5 c8=f:0 a10"), None),
    Case("two groups in the opposite order, ended", ("a10 t11 a10", "t11 a10 a10"), None),
    Case("stages of a pipeline", ("(>1@11 a15)x3", "(<0@21 a25)x3"), None, domains=((0,), (1,))),
    Case("messages in both directions, in opposite orders", ("(>1@11 <1@12 a10)x3 a10*", "(<0@22 >0@21 a10)x3"), None),
    Case("one stage is behind", (">1@11 a15 >1@11*", "<0@21 a15"), None),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_told(case: Case) -> None:
    everyone = tuple(range(len(case.ranks)))
    groups = {"world": everyone, "tp": everyone, "some": case.some}
    streams = {
        rank: stream(rank, text, groups, case.how.get(rank), case.first.get(rank))
        for rank, text in enumerate(case.ranks)
    }
    assert said(align(streams, case.domains)) == case.said


def said(parting: Parting | None) -> tuple[Edit, tuple[int, ...], Why, int | None] | None:
    if parting is None:
        return None
    line = parting.line.line if parting.line and parting.before else None
    return parting.edit, parting.odd, parting.why, line


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # a ring of three: the embedding of the first stage is shared with the last one, which leaves out its sum
        (("(>1@11 s15)x4 >1@11 s15*", "(<0@21 >2@22)x5 <0@21*", "(<1@31 s35)x4 <1@31 <1@31*"), (2, 35)),
        # each may be on its way
        (("(>1@11 s15)x4 >1@11 s15*", "(<0@21 >2@22)x4 <0@21", "(<1@31 s35)x4 <1@31*"), None),
    ],
)
def test_of_ranks_that_are_stuck_one_left_out_what_another_waits_for(
    ranks: tuple[str, ...], expected: tuple[int, int] | None
) -> None:
    groups = {"world": (0, 1, 2), "some": (0, 2)}
    streams = {rank: stream(rank, text, groups) for rank, text in enumerate(ranks)}
    parting = left_out_alone(streams)
    assert align(streams, [(0,), (1,), (2,)]) is None
    found = parting and parting.line and (*parting.odd, parting.line.line)
    assert found == expected
