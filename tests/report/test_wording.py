from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report import samples
from tpcompile.evidence.ranktext import ranks_text
from tpcompile.evidence.records import Item, RankGroup, UserLine
from tpcompile.report import wording


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((), ""), ((0,), "0"), ((0, 1), "0-1"), ((0, 1, 2, 5), "0-2,5"), ((7, 0, 6), "0,6-7")],
)
def test_ranks_are_written_as_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_every_rank_once(ranks: set[int]) -> None:
    named: list[int] = []
    for part in filter(None, ranks_text(tuple(ranks)).split(",")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ranks)


def test_groups_are_separated_by_a_bar() -> None:
    assert wording.groups_text(((0, 1, 2, 3, 4, 5, 6), (7,))) == "0-6 | 7"


def test_control_characters_become_visible_escapes() -> None:
    assert wording.plain("a\x1b[31mb\x00\ud800\tc\nd") == "a\\x1b[31mb\\x00\\ud800    c\nd"


def test_the_smallest_group_is_blamed() -> None:
    odd, others = (UserLine(file=name, line=1) for name in ("odd.py", "others.py"))
    groups = (
        RankGroup(ranks=(0, 1), item=Item(text="a", line=others)),
        RankGroup(ranks=(2,), item=Item(text="b", line=odd)),
    )
    assert wording.blamed_line(samples.divergence(groups=groups)) == odd


def test_of_two_equal_groups_the_one_without_rank_0_is_blamed() -> None:
    lines = [UserLine(file=f"rank{n}.py", line=1) for n in (0, 1)]
    groups = tuple(RankGroup(ranks=(n,), item=Item(text=str(n), line=lines[n])) for n in (0, 1))
    assert wording.blamed_line(samples.divergence(groups=groups)) == lines[1]


def test_a_huge_item_is_cut_with_a_note() -> None:
    text = wording.item_text(Item(text="x" * 5000))
    assert len(text) < 2100
    assert text.endswith("(and 3000 more characters, see record.json)")
