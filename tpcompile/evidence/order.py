"""Compiles that all ranks made -> whether they came in the same order: a hang where collectives change places."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.align import Slot
from tpcompile.evidence.byrank import Groups
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.domain import group_by
from tpcompile.evidence.layerspec import Row
from tpcompile.evidence.records import Divergence, DivergenceClass, Item, Layer, RankGroup, value_item
from tpcompile.evidence.several import differ


def swapped(slots: Sequence[Slot], ranks: Sequence[int], domain: str) -> Divergence | None:
    """Programs with collectives that ranks entered in another order: code runs when it is compiled.

    Variants of one function that issue the same collectives may change places.
    """
    issuing = [slot for slot in slots if any(c.num_items(Layer.COLLECTIVES) for c in slot.compiles.values())]
    groups = group_by({rank: tuple(map(_issues, _entered(issuing, rank))) for rank in ranks})
    if len(groups) == 1:
        return None
    return _first_swap(groups, [_entered(issuing, ranks[0]) for ranks in groups], domain)


def _first_swap(groups: Groups, orders: Sequence[Sequence[Slot]], domain: str) -> Divergence:
    columns = list(zip(*orders, strict=True))
    place = [differ(map(_issues, column)) for column in columns].index(True)
    entered = [slot.compiles[ranks[0]] for slot, ranks in zip(columns[place], groups, strict=True)]
    items = [value_item("with collectives", f"{c.frame} as number {place + 1}") for c in entered]
    sides = zip(groups, items, entered, strict=True)
    last = columns[place][-1]
    return Divergence(
        layer=Layer.COLLECTIVES,
        cls=DivergenceClass.COLLECTIVES,
        domain=domain,
        where=last.where,
        groups=tuple(RankGroup(ranks=ranks, item=item, frame_line=c.line) for ranks, item, c in sides),
        title=f"program number {place + 1} with collectives: {' / '.join(c.frame for c in entered)}",
        cause=Cause.ORDER_FORWARD,
        step=last.step,
        advice=Cause.ORDER_FORWARD.advice,
    )


def labels(slots: Sequence[Slot], ranks: Sequence[int]) -> dict[int, Item]:
    """What each rank calls the compiles that all made, where that differs: their order, or else their ids."""
    orders = {rank: value_item("order of compiles", str(_order(slots, rank))) for rank in ranks}
    ids = {rank: value_item("compile ids", str(_ids(slots, rank))) for rank in ranks}
    if Row(orders.values()).differs:
        return orders
    return ids if Row(ids.values()).differs else {}


def _order(slots: Sequence[Slot], rank: int) -> list[int]:
    positions = {slot.compiles[rank].index: number for number, slot in enumerate(slots)}
    return [positions[index] for index in sorted(positions)]


def _ids(slots: Sequence[Slot], rank: int) -> list[str]:
    return [slot.compiles[rank].compile_id for slot in slots]


def _issues(slot: Slot) -> tuple[str, str | None]:
    """What tells slots apart for whoever waits in them; where its ranks differ, that is a finding of its own."""
    first = slot.compiles[min(slot.compiles)]
    return first.frame, first.sha(Layer.COLLECTIVES)


def _entered(slots: Sequence[Slot], rank: int) -> list[Slot]:
    return sorted(slots, key=lambda slot: slot.compiles[rank].index)
