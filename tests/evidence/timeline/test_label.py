"""evidence/timeline/label: each kind of parting has a row, with cause and sentence."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.evidence.timeline.written import stream
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.timeline.align import align
from tpcompile.evidence.timeline.label import ROWS, Label, label
from tpcompile.evidence.timeline.parting import Edit
from tpcompile.evidence.timeline.stream import How

CALLS, STUCK, SIZES, VARIANT = (
    Cause.CALL_COUNT, Cause.STUCK_COLLECTIVE, Cause.COLLECTIVE_SIZES, Cause.WRONG_VARIANT,
)  # fmt: skip
STEP = "i5 a10 a11 a12"
IN_CALL = "i5 c8=f a8.40@f1 a10"


def labelled(*ranks: str, how: Mapping[int, How] | None = None) -> Label:
    groups = {"world": tuple(range(len(ranks)))}
    parting = align({rank: stream(rank, text, groups, (how or {}).get(rank)) for rank, text in enumerate(ranks)})
    assert parting is not None
    return label(parting)


SAID = {
    "left out": (
        labelled(f"({STEP})x3 i5 a10 a11*", f"({STEP})x3 i5 a10 a12*"),
        STUCK,
        (1,),
        "rank 1 left out all_reduce #11 of group 'world' at /home/me/train.py:11 in main, which rank 0 issued; "
        "rank 1 issued all_reduce #11 of group 'world' at /home/me/train.py:12 in main",
    ),
    "ended": (
        labelled("(i5 a10)x4 i5 a10*", "(i5 a10)x4", how={1: How.FINISHED}),
        STUCK,
        (1,),
        "rank 1 has finished, before iteration #5 at /home/me/train.py:5 in main, which rank 0 began",
    ),
    "content": (
        labelled("(i5 a10:4)x3 i5 a10:4*", "(i5 a10:4)x3 i5 a10:8*"),
        SIZES,
        (1,),
        "what differ: rank 1 issued all_reduce #4",
    ),
    "nobody is blamed": (
        labelled("i5 a10*", "i5 a11*"),
        STUCK,
        (0, 1),
        "rank 0 issued all_reduce #1 of group 'world' at /home/me/train.py:10 in main; rank 1 issued",
    ),
    "a variant": (
        labelled("(i5 c8=f:0 a8.40)x4", "(i5 c8=f:0 a8.40)x3 i5 c8=f:1 a8.40"),
        VARIANT,
        (1,),
        "what differ: rank 1 made call 4 of f",
    ),
    "a message, both ends of which are at one line": (
        labelled("(>1@11 <1@11 a15)x3 >1@11* <1@11*", "(<0@11 >0@11 a15)x3 a15*"),
        STUCK,
        (1,),
        "rank 1 left out receive from rank 0 at /home/me/train.py:11 in main, while rank 0 is in send to rank 1",
    ),
    "a message": (
        labelled("(a10 >1@11)x3 a10 a10*", "(a10 <0@21)x3 a10 <0@21*"),
        STUCK,
        (0,),
        "rank 0 left out send to rank 1 at /home/me/train.py:11 in main, while rank 1 is in receive from rank 0",
    ),
}
"""Name -> what is said of it, its cause, its ranks, and how the sentence begins."""


@pytest.mark.parametrize("name", SAID)
def test_a_parting_has_cause_ranks_and_a_sentence(name: str) -> None:
    found, cause, ranks, says = SAID[name]
    assert (found.cause, found.ranks) == (cause, ranks)
    assert found.says.startswith(says) or says in found.says, found.says


def test_every_edit_has_a_row_for_any_kind() -> None:
    assert {row.edit for row in ROWS if row.kind is None} == set(Edit)


def test_a_row_for_a_kind_stands_above_the_one_for_any() -> None:
    for edit in Edit:
        kinds = [row.kind for row in ROWS if row.edit == edit]
        assert kinds.index(None) == len(kinds) - 1
