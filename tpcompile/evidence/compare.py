"""`RankDigest`s of all ranks -> `Divergence`s, first difference first.

Hashes decide whether anything differs; only then `fetch` is asked for the items of the layers that do, once per
group of equal ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpcompile.evidence import order
from tpcompile.evidence.align import Slot, align
from tpcompile.evidence.alone import compiled_alone
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.domain import Allowed, Domain, Fetch, by_domain, group_by, sides
from tpcompile.evidence.layerdiff import environment, of_slot
from tpcompile.evidence.layerspec import Row
from tpcompile.evidence.records import (
    CompileDigest,
    Divergence,
    DivergenceClass,
    Item,
    Layer,
    RankDigest,
    value_item,
)

__all__ = ["Allowed", "Fetch", "compare", "equal_groups"]


def compare(digests: Sequence[RankDigest], fetch: Fetch, *, allowed: Allowed = ()) -> tuple[Divergence, ...]:
    """Compare the ranks of every symmetry domain, layer by layer from cause to effect."""
    found: list[Divergence] = []
    for name, ranks in by_domain(digests).items():
        found += _compare(Domain(name, ranks, fetch, allowed))
    return tuple(found)


def _compare(domain: Domain) -> list[Divergence]:
    found = environment(domain)
    slots = align(domain.ranks)
    whole = {d.rank for d in domain.ranks if not d.is_cut}
    explained: set[int] = set()
    for slot in slots:
        absent = tuple(sorted(whole.difference(slot.compiles)))
        if not absent:
            here = of_slot(domain, slot)
        elif explained.issuperset(slot.compiles):
            continue  # compiled behind a graph break, or as a part of what others compile whole: named already
        else:
            here = [compiled_alone(domain, slot, absent)]
        explained.update(*map(_explains_others, here))
        found += here
    return [*found, *_order(domain, slots), *_caches(domain, slots)]


def _explains_others(divergence: Divergence) -> tuple[int, ...]:
    """Ranks whose further compiles follow from this finding."""
    if divergence.cause == Cause.REGIONAL_COMPILE:
        return divergence.ranks
    if divergence.cause == Cause.GRAPH_BREAK:
        return tuple(rank for group in divergence.groups if group.item for rank in group.ranks)
    return ()


def _order(domain: Domain, slots: Sequence[Slot]) -> list[Divergence]:
    """Equal content under other labels or in another order: information, unless collectives change places."""
    complete = [slot for slot in slots if len(slot.compiles) == len(domain.ranks)]
    ranks = [d.rank for d in domain.ranks]
    found = order.swapped(complete, ranks, domain.name)
    if found is None:
        labels = order.labels(complete, ranks)
        return [_information(domain, Layer.GRAPH, Cause.COMPILE_ORDER, labels)] if labels else []
    reason = domain.reason(Layer.COLLECTIVES, Row(group.item for group in found.groups))
    if reason:
        found = found.model_copy(update={"cls": DivergenceClass.DECLARED, "advice": f"declared: {reason}"})
    return [found]


def _caches(domain: Domain, slots: Sequence[Slot]) -> list[Divergence]:
    """Equal content, loaded from a cache by some ranks and compiled by others: information."""
    for slot in slots:
        outcomes = {rank: _cache_outcome(c) for rank, c in slot.compiles.items()}
        known = {rank: value_item("compile cache", outcome) for rank, outcome in outcomes.items() if outcome}
        if len(set(outcomes.values()) - {""}) > 1:
            return [_information(domain, Layer.KERNELS, Cause.CACHE_SPLIT, known)]
    return []


def _cache_outcome(compile_: CompileDigest) -> str:
    ends = {event.rpartition("_")[2] for event in compile_.cache}
    if "miss" in ends:
        return "miss"
    return "hit" if "hit" in ends else ""


def _information(domain: Domain, layer: Layer, cause: Cause, items: Mapping[int, Item]) -> Divergence:
    groups = group_by({rank: item.says for rank, item in items.items()})
    return Divergence(
        layer=layer,
        cls=DivergenceClass.LABEL,
        domain=domain.name,
        where="",
        groups=sides(groups, [items[ranks[0]] for ranks in groups]),
        title=cause.value,
        cause=cause,
        advice=cause.advice,
    )


def equal_groups(digests: Sequence[RankDigest]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Domain -> groups of ranks whose whole digest is equal, for the table of a report."""
    return {name: group_by({d.rank: _whole(d) for d in ranks}) for name, ranks in by_domain(digests).items()}


def _whole(digest: RankDigest) -> str:
    return digest.environment + "".join(layer.sha256 for layer in digest.layers)
