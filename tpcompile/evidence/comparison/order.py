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
    issuing = [slot for slot in slots if slot.compiles.where(lambda compile_: compile_.num_items(Layer.COLLECTIVES))]
    entered = ByRank({rank: sorted(issuing, key=lambda slot: slot.taken[rank].index) for rank in ranks})
    issued = entered.map(lambda in_order: tuple(map(_issues, in_order)))
    groups = issued.groups()
    columns = zip(*(entered[ranks[0]] for ranks in groups), strict=True)
    for number, column in enumerate(columns, start=1):
        if differ(map(_issues, column)):
            return _at_place(groups, column, number, domain)
    return None


def _at_place(groups: Groups, slots: Sequence[Slot], number: int, domain: str) -> Divergence:
    """The finding for what each group of ranks entered as its n-th program with collectives."""
    entered = [slot.compiles[ranks[0]] for ranks, slot in zip(groups, slots, strict=True)]
    frames = [compile_.frame for compile_ in entered]
    items = [value_item("with collectives", f"{frame} as number {number}") for frame in frames]
    sides = [
        RankGroup(ranks=ranks, item=item, frame_line=compile_.line)
        for ranks, item, compile_ in zip(groups, items, entered, strict=True)
    ]
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


def labels(slots: Sequence[Slot], ranks: Sequence[int]) -> tuple[str, ByRank[str]]:
    """The order of the compiles that all ranks made, by rank; where the order is the same, their compile ids."""
    made = ByRank({rank: [slot.taken[rank] for slot in slots] for rank in ranks})
    orders = made.map(lambda taken: str(sorted(range(len(slots)), key=lambda number: taken[number].index)))
    ids = made.map(lambda taken: str([one.compile_id for one in taken]))
    return ("order of compiles", orders) if orders.differ() else ("compile ids", ids)


def _issues(slot: Slot) -> tuple[str, str | None]:
    """Frame and collectives of a slot on its first rank; where its ranks differ, that is a finding of its own."""
    first = slot.taken[min(slot.taken)]
    return first.frame, first.sha(Layer.COLLECTIVES)
