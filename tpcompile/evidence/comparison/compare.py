"""`RankDigest`s of all ranks -> `Divergence`s, first difference first.

Hashes decide whether anything differs; only then `fetch` is asked for the items of the layers that do, once per
group of equal ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.comparison import order
from tpcompile.evidence.comparison.by_layer import environment, of_slot
from tpcompile.evidence.comparison.compiled_by_some import compiled_alone
from tpcompile.evidence.comparison.other_call import are_other_calls
from tpcompile.evidence.comparison.replicas import decided_by_replicas
from tpcompile.evidence.comparison.unexplained import DEFECTS, unexplained
from tpcompile.evidence.comparison.whole_and_parts import Programs
from tpcompile.evidence.groups.align import Slot, align
from tpcompile.evidence.groups.by_group import Row
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.groups.domain import Allowed, Domain, Fetch, by_domain, sides
from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import (
    Divergence,
    DivergenceClass,
    Layer,
    RankDigest,
    ranks_of,
    value_item,
)
from tpcompile.evidence.records.base import known
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.lines import in_program, is_installed

__all__ = ["Allowed", "Fetch", "compare"]


def compare(
    digests: Sequence[RankDigest], fetch: Fetch, *, allowed: Allowed = (), is_running: bool = False
) -> tuple[Divergence, ...]:
    """Compare the ranks of every symmetry domain, layer by layer from cause to effect.

    `is_running`: the ranks continue, so that what one of them has not compiled may follow.

    A domain whose ranks cannot finish comes first: differences in other domains follow from it.
    """
    hangs: list[Divergence] = []
    others: list[Divergence] = []
    for name, ranks in by_domain(digests).items():
        found = decided_by_replicas(_compare(Domain(name, ranks, fetch, allowed, is_running)), digests)
        cannot_finish = any(divergence.cls == DivergenceClass.COLLECTIVES for divergence in found)
        if cannot_finish:
            hangs += found
        else:
            others += found
    return (*hangs, *others)


def _compare(domain: Domain) -> list[Divergence]:
    found = environment(domain)
    slots = align(domain.ranks)
    programs = Programs(domain)
    whole = set(domain.digests.where(lambda digest: not digest.is_cut))
    explained: set[int] = set()
    for slot in slots:
        absent = tuple(sorted(whole.difference(slot.compiles)))
        if absent and explained.issuperset(slot.compiles):
            continue  # compiled after a graph break, or a part of what other ranks compile whole: already reported
        here = _of_slot(programs, slot, absent)
        found += here
        for divergence in here:
            if divergence.cause == Cause.REGIONAL_COMPILE:
                explained.update(divergence.ranks)
            if divergence.cause == Cause.GRAPH_BREAK:
                explained.update(ranks_of(group for group in divergence.groups if group.item))
    return [*found, *_order(domain, slots), *_caches(domain, slots)]


def _of_slot(programs: Programs, slot: Slot, absent: tuple[int, ...]) -> list[Divergence]:
    """What differs in one compile; the finding is kept, without a cause, when naming the cause fails."""
    domain = programs.domain
    try:
        if absent:
            found = [compiled_alone(programs, slot, absent)]
        elif slot.differing and are_other_calls(domain, slot):
            # Counted as one call, they belong to different ones, as an evaluation before the first step.
            places = slot.compiles.map(lambda compile_: f"called from {compile_.called_from[-1]}")
            found = [_information(domain, Layer.GRAPH, Cause.EXTRA_COMPILE, slot.frame, places)]
        else:
            found = of_slot(domain, slot)
        return list(map(_with_program, found))
    except DEFECTS as error:
        is_different = absent or slot.differing
        if not is_different:
            raise
        return [unexplained(domain, slot, absent, error)]


def _with_program(divergence: Divergence) -> Divergence:
    """The divergence; the title of one in an installed package has the user's function that leads to it."""
    if not divergence.is_red:
        return divergence
    frames = known(group.frame_line for group in divergence.groups)
    frame = find(frames, lambda line: not is_installed(line))
    within = in_program(divergence.line, frame)
    title = f"{divergence.title}{within}"
    return divergence.model_copy(update={"title": title})


def _order(domain: Domain, slots: Sequence[Slot]) -> list[Divergence]:
    """Equal content under different labels or in a different order: information, unless collectives are reordered."""
    complete = [slot for slot in slots if len(slot.compiles) == len(domain.ranks)]
    ranks = list(domain.digests)
    found = order.swapped(complete, ranks, domain.name)
    if found:
        reason = domain.reason(Layer.COLLECTIVES, Row(group.item for group in found.groups))
        declared = {"cls": DivergenceClass.DECLARED, "advice": f"declared: {reason}"}
        return [found.model_copy(update=declared) if reason else found]
    name, labels = order.labels(complete, ranks)
    if labels.differ():
        return [_information(domain, Layer.GRAPH, Cause.COMPILE_ORDER, name, labels)]
    return []


def _caches(domain: Domain, slots: Sequence[Slot]) -> list[Divergence]:
    """Equal content that some ranks loaded from a cache and others compiled: information."""
    for slot in slots:
        ends = slot.compiles.map(lambda compile_: {event.rpartition("_")[2] for event in compile_.cache})
        # `miss` where any part was compiled, `hit` where all was loaded; a rank that used no cache is left out.
        outcomes = ends.found(lambda own: find(("miss", "hit"), own.__contains__))
        if outcomes.differ():
            return [_information(domain, Layer.KERNELS, Cause.CACHE_SPLIT, "compile cache", outcomes)]
    return []


def _information(domain: Domain, layer: Layer, cause: Cause, about: str, texts: ByRank[str]) -> Divergence:
    return Divergence(
        layer=layer,
        cls=DivergenceClass.LABEL,
        domain=domain.name,
        where="",
        groups=sides(texts.groups(), [value_item(about, text) for _, text in texts.sides()]),
        title=cause.value,
        cause=cause,
        advice=cause.note,
    )
