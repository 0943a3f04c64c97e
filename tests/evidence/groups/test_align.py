"""Compiles of several ranks -> slots, by content and call and never by label."""

from __future__ import annotations

from tests.evidence.samples import call, compiled, record
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.groups.align import Slot, align
from tpcompile.evidence.records import CompileRecord, UserLine


def slots(*per_rank: list[CompileRecord]) -> list[Slot]:
    """Slots of ranks with these compiles."""
    return align([digest_rank(record(rank, *compiles)) for rank, compiles in enumerate(per_rank)])


def labels(found: list[Slot]) -> list[dict[int, str]]:
    """Rank -> compile id, per slot."""
    return [{rank: c.compile_id for rank, c in slot.compiles.items()} for slot in found]


def one(factor: int = 2, label: str = "0/0", **fields: object) -> CompileRecord:
    """A compile of `x * factor`."""
    return compiled(call("mul", "%0", str(factor)), compile_id=label, **fields)


def test_equal_compiles_share_a_slot_whatever_their_labels() -> None:
    assert labels(slots([one(label="0/0")], [one(label="3/1")])) == [{0: "0/0", 1: "3/1"}]


def test_the_same_two_graphs_in_the_opposite_order_align_by_content() -> None:
    found = slots([one(2, "0/0"), one(3, "1/0")], [one(3, "0/0"), one(2, "1/0")])
    assert labels(found) == [{0: "0/0", 1: "1/0"}, {0: "1/0", 1: "0/0"}]


def test_an_extra_compile_shifts_no_other() -> None:
    found = slots([one(2, "0/0"), one(3, "1/0")], [one(7, "0/0", function="extra"), one(2, "1/0"), one(3, "2/0")])
    assert labels(found) == [{0: "0/0", 1: "1/0"}, {0: "1/0", 1: "2/0"}, {1: "0/0"}]


def test_a_compile_with_other_content_aligns_with_its_frame_in_the_same_call() -> None:
    assert labels(slots([one(2)], [one(3)])) == [{0: "0/0", 1: "0/0"}]


def test_an_exact_match_is_taken_before_a_match_by_frame() -> None:
    found = slots([one(2, "0/0"), one(3, "0/1")], [one(3, "0/0")])
    assert labels(found) == [{0: "0/0"}, {0: "0/1", 1: "0/0"}]


def test_the_same_content_in_a_different_call_still_aligns() -> None:
    assert len(slots([one(phase="C/first")], [one(phase="C/steady")])) == 1


def test_the_same_graph_of_frames_with_other_names_aligns() -> None:
    assert len(slots([one(function="forward")], [one(function="inner")])) == 1


def test_the_same_call_twice_fills_two_slots() -> None:
    assert labels(slots([one(), one(label="1/0")], [one(), one(label="1/0")])) == [
        {0: "0/0", 1: "0/0"}, {0: "1/0", 1: "1/0"},
    ]  # fmt: skip


def test_a_compile_that_the_limit_prevented_meets_the_one_that_another_rank_made_there() -> None:
    """torch logs no caller of it; an unknown caller is none of the rank's own."""
    at = (UserLine(file="/home/me/train.py", line=7, function="main"),)
    made = [one(2, "0/0", called_from=at), one(3, "0/1", called_from=at)]
    prevented = compiled(compile_id="0/1", limit_reached=True, called_from=())
    assert labels(slots(made, [one(2, "0/0", called_from=at), prevented]))[1:] == [{0: "0/1", 1: "0/1"}]
    of_its_own = one(5, "0/1", called_from=(UserLine(file="/home/me/train.py", line=90, function="main"),))
    assert labels(slots(made, [one(2, "0/0", called_from=at), of_its_own]))[1:] == [{0: "0/1"}, {1: "0/1"}]


def test_a_slot_is_named_by_phase_labels_and_frame() -> None:
    (slot,) = slots([one(label="0/0")], [one(label="1/0")])
    assert (slot.phase, slot.frame) == ("C/first", "forward app/model.py:3")
    assert all(part in slot.where for part in (slot.phase, "0/0/1/0", slot.frame))
