"""Compiles that all ranks made -> whether the order is the same: a hang where collectives are reordered."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.groups.align import Slot
from tpcompile.evidence.groups.by_rank import ByRank, Groups
from tpcompile.evidence.iterables import differ
from tpcompile.evidence.records import Divergence, DivergenceClass, Layer, RankGroup, value_item
from tpcompile.evidence.records.causes import Cause


def swapped(slots: Sequence[Slot], ranks: Sequence[int], domain: str) -> Divergence | None:
    """The first program with collectives that ranks entered in a different order: code runs when it is compiled.

    Variants of one function that issue the same collectives may be entered in any order.
    """
    issuing = list(filter(_has_collectives, slots))
    entered = ByRank({rank: _entered(issuing, rank) for rank in ranks})
    issued = entered.map(_all_issued)
    groups = issued.groups()
    columns = zip(*(entered[ranks[0]] for ranks in groups), strict=True)
    for number, column in enumerate(columns, start=1):
        if differ(map(_issues, column)):
            return _at_place(groups, column, number, domain)
    return None


def _at_place(groups: Groups, slots: Sequence[Slot], number: int, domain: str) -> Divergence:
    """The finding for what each group of ranks entered as its n-th program with collectives."""
    sides = [_side(ranks, slot, number) for ranks, slot in zip(groups, slots, strict=True)]
    frames = [slot.compiles[ranks[0]].frame for ranks, slot in zip(groups, slots, strict=True)]
    return Divergence(
        layer=Layer.COLLECTIVES,
        cls=DivergenceClass.COLLECTIVES,
        domain=domain,
        where=slots[-1].where,
        groups=tuple(sides),
        title=f"program number {number} with collectives: {' / '.join(frames)}",
        cause=Cause.ORDER_FORWARD,
        step=slots[-1].step,
        advice=Cause.ORDER_FORWARD.advice,
    )


def _side(ranks: tuple[int, ...], slot: Slot, number: int) -> RankGroup:
    entered = slot.compiles[ranks[0]]
    item = value_item("with collectives", f"{entered.frame} as number {number}")
    return RankGroup(ranks=ranks, item=item, frame_line=entered.line)


def labels(slots: Sequence[Slot], ranks: Sequence[int]) -> tuple[str, ByRank[str]]:
    """The order of the compiles that all ranks made, by rank; where the order is the same, their compile ids."""
    orders = ByRank({rank: str(_order(slots, rank)) for rank in ranks})
    ids = ByRank({rank: str(_ids(slots, rank)) for rank in ranks})
    return ("order of compiles", orders) if orders.differ() else ("compile ids", ids)


def _order(slots: Sequence[Slot], rank: int) -> list[int]:
    return sorted(range(len(slots)), key=lambda number: slots[number].taken[rank].index)


def _ids(slots: Sequence[Slot], rank: int) -> list[str]:
    return [slot.taken[rank].compile_id for slot in slots]


def _has_collectives(slot: Slot) -> bool:
    return bool(slot.compiles.where(lambda compile_: compile_.num_items(Layer.COLLECTIVES)))


def _all_issued(slots: Sequence[Slot]) -> tuple[tuple[str, str | None], ...]:
    return tuple(map(_issues, slots))


def _issues(slot: Slot) -> tuple[str, str | None]:
    """Frame and collectives of a slot on its first rank; where its ranks differ, that is a finding of its own."""
    first = slot.taken[min(slot.taken)]
    return first.frame, first.sha(Layer.COLLECTIVES)


def _entered(slots: Sequence[Slot], rank: int) -> list[Slot]:
    return sorted(slots, key=lambda slot: slot.taken[rank].index)
