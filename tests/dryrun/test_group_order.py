"""Process groups of all ranks -> which ranks made others than the rest."""

from __future__ import annotations

from tpcompile.dryrun.group_order import GroupOrder
from tpcompile.dryrun.rank import Group, Left
from tpcompile.evidence.records import CheckId, UserLine

LINE = UserLine(file="/app/train.py", line=7, function="main", code="dist.new_group(half)")
FIRST, SECOND = Group(name="", ranks="0-1", line=LINE), Group(name="", ranks="2-3", line=LINE)


def order_of(*made: tuple[Group, ...]) -> GroupOrder:
    order = GroupOrder()
    seen: dict[tuple[Group, ...], str] = {}
    for rank, groups in enumerate(made):
        is_new = groups not in seen
        name = seen.setdefault(groups, str(len(seen)))
        order.take(rank, Left(groups=name, groups_made=groups if is_new else ()))
    return order


def test_equal_orders_are_no_problem() -> None:
    assert order_of((FIRST, SECOND), (FIRST, SECOND)).problems() == []
    assert GroupOrder().problems() == []


def test_a_rank_that_makes_them_in_its_own_order_is_named_with_its_line() -> None:
    usual = (FIRST, SECOND)
    (check,) = order_of(usual, usual, (SECOND, FIRST), usual).problems()
    assert (check.id, check.ranks, check.line, check.is_rank_known) == (CheckId.GROUPS, (2,), LINE, True)


def test_a_rank_that_makes_one_less_is_named_with_the_line_that_it_left_out() -> None:
    (check,) = order_of((FIRST, SECOND), (FIRST,), (FIRST, SECOND)).problems()
    assert (check.ranks, check.line) == ((1,), LINE)


def test_without_a_majority_no_rank_is_at_fault() -> None:
    (check,) = order_of((FIRST, SECOND), (SECOND, FIRST)).problems()
    assert not check.is_rank_known
