"""Differences of a verdict -> the groups of equal ranks in each domain, and one line for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tpcompile.evidence.groups.by_rank import ByRank, Groups
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import CheckId, Divergence, Verdict
from tpcompile.evidence.text.hosts import ranks_by_host
from tpcompile.evidence.text.phrases import listed
from tpcompile.evidence.text.ranks import (
    axis_of,
    named_ranks,
    places_of,
    ranks_in_name,
    ranks_of_exact,
    ranks_text,
)

_MAX_DOMAINS = 8
"""Domains that have a line each; of more, those in which the same places are equal share one."""
_MAX_LINES = 8


def equal_groups(domains: Mapping[str, Sequence[int]], found: Iterable[Divergence]) -> dict[str, Groups]:
    """Domain -> groups of its ranks that no red difference separates.

    What is declared or differs by nature separates no ranks: a verdict that passes has one group in each domain.
    """
    red = [divergence for divergence in found if divergence.is_red]
    equal: dict[str, Groups] = {}
    for name, ranks in sorted(domains.items()):
        sides: dict[int, list[int]] = {rank: [] for rank in ranks}
        for divergence in red:
            if divergence.domain not in ("", name):
                continue
            number_of = {rank: number for number, group in enumerate(divergence.groups) for rank in group.ranks}
            for rank, numbers in sides.items():
                numbers.append(number_of.get(rank, -1))  # -1: the difference is not about this rank
        equal[name] = ByRank(sides).groups(tuple)
    return equal


def equal_ranks(verdict: Verdict) -> list[tuple[str, bool]]:
    """`equal ranks in tp: 0-1 | 2` of each domain, with True where its ranks are not equal.

    Ranks without a record come last: they left before the comparison, and are equal to nobody.
    """
    missing = _missing(verdict)
    found: list[tuple[str, bool]] = []
    if len(verdict.domains) > _MAX_DOMAINS:
        found += _alike(verdict.domains)
    for domain, groups in sorted(verdict.domains.items()) if not found else ():
        text = " | ".join(ranks_text(group) for group in groups)
        here = [one for one in verdict.divergences if one.domain == domain]
        accepted = [one for one in here if not one.is_red]
        is_split = len(groups) > 1
        note = "" if missing else " (all equal)"
        if accepted:
            note = f" (but for {len(accepted)} accepted)"
        if is_split:
            note = ""
        found.append((f"equal ranks in {domain}: {text}{note}", is_split))
    if missing:
        found.append((f"no record: {named_ranks(missing)}", False))
    if verdict.hosts:
        places = ranks_by_host(verdict.hosts)
        found.append((f"ranks by host: {listed(places, by=' | ', at_most=_MAX_LINES)}", False))
    return found


def _missing(verdict: Verdict) -> tuple[int, ...]:
    """Ranks that were to be compared and have no record.

    Others have none either: those of other domains where one alone was judged, those that a dry run does not trace.
    """
    recorded = {rank for groups in verdict.domains.values() for group in groups for rank in group}
    if not recorded:
        return ()
    awaited = {rank for check in verdict.checks if check.id == CheckId.REPORTED for rank in check.ranks}
    for name in verdict.domains:
        ranks = ranks_in_name(name)
        awaited.update(ranks_of_exact(ranks, at_most=verdict.world_size) if ranks else range(verdict.world_size))
    return tuple(sorted(awaited - recorded))


def _alike(domains: Mapping[str, Groups]) -> list[tuple[str, bool]]:
    """`equal ranks in 64 groups of tp, ranks 0-255: tp 0,2-3 | tp 1`; the domains that are not equal come first."""
    by_places = grouped(sorted(domains), lambda name: (axis_of(name), places_of(domains[name])))
    found: list[tuple[str, bool]] = []
    for (axis, places), names in sorted(by_places.items(), key=lambda item: (len(item[0][1]) == 1, len(item[1]))):
        ranks = [rank for name in names for group in domains[name] for rank in group]
        sides = " | ".join(f"{axis} {ranks_text(group)}" for group in places)
        is_split = len(places) > 1
        within = f"{len(names)} groups of {axis}, {named_ranks(ranks)}" if len(names) > 1 else names[0]
        found.append((f"equal ranks in {within}: {sides if is_split else 'all equal'}", is_split))
    num_more = len(found) - _MAX_LINES
    return found[:_MAX_LINES] + (
        [(f"and {num_more} more: verdict.json has all of them", False)] if num_more > 0 else []
    )
