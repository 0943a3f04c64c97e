"""`RankDigest`s of all ranks -> `Divergence`s, first difference first.

Hashes decide whether anything differs; only then `fetch` is asked for the items of the layers that do, once per
group of equal ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from tpcompile.evidence.comparison import order
from tpcompile.evidence.comparison.by_layer import environment, of_slot
from tpcompile.evidence.comparison.compiled_by_some import compiled_alone
from tpcompile.evidence.comparison.other_call import are_other_calls
from tpcompile.evidence.comparison.unexplained import DEFECTS, unexplained
from tpcompile.evidence.comparison.whole_and_parts import Programs
from tpcompile.evidence.groups.align import Slot, align
from tpcompile.evidence.groups.by_group import Row
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.groups.domain import Allowed, Domain, Fetch, by_domain, sides
from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import (
    CompileDigest,
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
    by_name = by_domain(digests)
    found = [_compare(Domain(name, ranks, fetch, allowed, is_running)) for name, ranks in by_name.items()]
    return tuple(itertools.chain.from_iterable(sorted(found, key=_can_finish)))


def _can_finish(found: Iterable[Divergence]) -> bool:
    """True unless the ranks issue different collectives."""
    return all(divergence.cls != DivergenceClass.COLLECTIVES for divergence in found)


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
        explained.update(*map(_explains_others, here))
        found += here
    return [*found, *_order(domain, slots), *_caches(domain, slots)]


def _of_slot(programs: Programs, slot: Slot, absent: tuple[int, ...]) -> list[Divergence]:
    """What differs in one compile; the finding is kept, without a cause, when naming the cause fails."""
    domain = programs.domain
    try:
        if absent:
            found = [compiled_alone(programs, slot, absent)]
        elif slot.differing and are_other_calls(domain, slot):
            found = [_other_calls(domain, slot)]
        else:
            found = of_slot(domain, slot)
        return list(map(_with_program, found))
    except DEFECTS as error:
        is_different = absent or slot.differing
        if not is_different:
            raise
        return [unexplained(domain, slot, absent, error)]


def _other_calls(domain: Domain, slot: Slot) -> Divergence:
    """Compiles that were counted as one call and belong to different ones, as an evaluation before the first step."""
    places = slot.compiles.map(lambda compile_: f"called from {compile_.called_from[-1]}")
    return _information(domain, Layer.GRAPH, Cause.EXTRA_COMPILE, slot.frame, places)


def _with_program(divergence: Divergence) -> Divergence:
    """With the function of the user's program behind a difference, where that is in an installed package."""
    frame = find(known(group.frame_line for group in divergence.groups), lambda line: not is_installed(line))
    within = in_program(divergence.line, frame)
    return divergence.model_copy(update={"title": divergence.title + within}) if divergence.is_red else divergence


def _explains_others(divergence: Divergence) -> tuple[int, ...]:
    """Ranks whose further compiles are a consequence of this finding."""
    broken = [group for group in divergence.groups if group.item]
    explained = {Cause.REGIONAL_COMPILE: divergence.ranks, Cause.GRAPH_BREAK: ranks_of(broken)}
    return explained.get(divergence.cause, ())


def _order(domain: Domain, slots: Sequence[Slot]) -> list[Divergence]:
    """Equal content under different labels or in a different order: information, unless collectives are reordered."""
    complete = [slot for slot in slots if len(slot.compiles) == len(domain.ranks)]
    ranks = list(domain.digests)
    found = order.swapped(complete, ranks, domain.name)
    if found:
        return [_unless_declared(domain, found)]
    name, labels = order.labels(complete, ranks)
    if labels.differ():
        return [_information(domain, Layer.GRAPH, Cause.COMPILE_ORDER, name, labels)]
    return []


def _unless_declared(domain: Domain, found: Divergence) -> Divergence:
    """The finding, listed as declared where the allow-list says that it is intended."""
    shown = Row(group.item for group in found.groups)
    reason = domain.reason(Layer.COLLECTIVES, shown)
    if not reason:
        return found
    return found.model_copy(update={"cls": DivergenceClass.DECLARED, "advice": f"declared: {reason}"})


def _caches(domain: Domain, slots: Sequence[Slot]) -> list[Divergence]:
    """Equal content that some ranks loaded from a cache and others compiled: information."""
    outcomes = (slot.compiles.map(_cache_outcome).where(bool) for slot in slots)
    split = find(outcomes, lambda found: found.differ())
    return [_information(domain, Layer.KERNELS, Cause.CACHE_SPLIT, "compile cache", split)] if split else []


def _cache_outcome(compile_: CompileDigest) -> str:
    """`miss` where any part was compiled, `hit` where all was loaded, empty where no cache was used."""
    ends = {event.rpartition("_")[2] for event in compile_.cache}
    return find(("miss", "hit"), lambda outcome: outcome in ends) or ""


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
