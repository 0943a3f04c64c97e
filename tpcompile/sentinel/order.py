"""Collectives of the ranks in the order of time, over all groups -> the rank that left the order of most ranks: pure.

Ranks of different domains issue the same collectives in groups of the same role (`mesh_tp`, `mesh_dp`), although no
group contains all of them. Sizes and lines may differ between domains; the op and the role of the group may not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import Issued, RankState, place_of

_Step = tuple[str, str]
"""(op, role of the group)."""


def left_the_order(states: Mapping[int, RankState]) -> Finding | None:
    """The finding where fewer ranks than half wait in a collective that the others did not issue at that place.

    A difference after which a rank continued is none: stages of a pipeline may run different programs.
    """
    orders = _from_common_start(ByRank(states).map(_in_order))
    if min(map(len, orders.values()), default=0) == 0:
        return None
    meetings = zip_longest(*orders.values())
    here = first(dict(zip(orders, met, strict=True)) for met in meetings if len(set(map(_step, met))) > 1)
    if here is None:
        return None
    odd = ByRank(here).unlike_majority(_step)
    return _finding(here, odd, orders) if odd and all(_is_last(here[rank], orders[rank]) for rank in odd) else None


def _in_order(state: RankState) -> list[Issued]:
    return sorted(state.issued, key=lambda issued: (-issued.age_s, issued.seq))


def _from_common_start(orders: ByRank[list[Issued]]) -> ByRank[list[Issued]]:
    """The collectives from the first number of each role that all ranks still know."""
    oldest = [_oldest(order) for order in orders.values()]
    starts = {role: max(numbers.get(role, 0) for numbers in oldest) for role in set[str]().union(*oldest)}
    return orders.map(lambda order: [one for one in order if one.seq >= starts[_role(one)]])


def _oldest(order: Sequence[Issued]) -> dict[str, int]:
    """Role -> the lowest number that is still known."""
    return {_role(one): one.seq for one in reversed(order)}


def _role(issued: Issued) -> str:
    """`mesh_tp` of `3 mesh_tp`; a group without a description has a role of its own."""
    _, _, description = issued.group.partition(" ")
    return issued.group if description in ("", "undefined") else description


def _step(issued: Issued | None) -> _Step | None:
    return (issued.op, _role(issued)) if issued is not None else None


def _is_last(issued: Issued | None, order: Sequence[Issued]) -> bool:
    return issued is not None and issued is order[-1] and not issued.is_done


def _finding(here: Mapping[int, Issued | None], odd: tuple[int, ...], orders: ByRank[list[Issued]]) -> Finding | None:
    theirs = here[odd[0]]
    others = ByRank(here).without(odd)
    usual = others.first
    if theirs is None or usual is None:
        return None
    says = f"{named_ranks(odd)} issued {theirs} where {named_ranks(others.ranks)} issued {usual}"
    return Finding(Cause.STUCK_COLLECTIVE, says, odd, _own_frame(theirs, orders.without(odd)) or theirs.line)


def _own_frame(issued: Issued, others: ByRank[list[Issued]]) -> UserLine | None:
    """The innermost frame from which no other rank issued a collective."""
    used = {place for order in others.values() for one in order for place in one.place}
    return first(frame for frame in issued.stack if not used.issuperset(place_of([frame])))
