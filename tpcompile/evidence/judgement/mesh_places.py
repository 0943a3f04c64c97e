"""Ranks of a finding -> where they are in the mesh: `all with pp = 1`, or the coordinates of a single one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tpcompile.evidence.judgement import leading
from tpcompile.evidence.records import Lead, RankDigest, Verdict
from tpcompile.evidence.text.ranks import ranks_text

Coordinates = Mapping[int, Mapping[str, int]]
"""Rank -> its coordinate along each axis of the mesh."""


def coordinates_of(digests: Iterable[RankDigest]) -> Coordinates:
    """Those that the ranks have sent."""
    return {digest.rank: digest.coordinates for digest in digests}


def with_places(verdict: Verdict, coordinates: Coordinates) -> Verdict:
    """The verdict, whose lead has the ranks of all domains with the same difference, and where they are in the mesh."""
    if verdict.lead is None:
        return verdict
    return _placed(verdict, verdict.lead, _everywhere(verdict, verdict.lead), coordinates)


def with_same_elsewhere(verdict: Verdict, lead: Lead, others: Iterable[Lead], coordinates: Coordinates) -> Verdict:
    """The verdict of a domain with that lead, which gets the ranks of the same finding in other domains."""
    ranks, hosts = set(lead.ranks), {host: set(theirs) for host, theirs in lead.hosts.items()}
    for one in others:
        if _said(one) != _said(lead) or lead.parted is not None:
            continue
        ranks.update(one.ranks)
        for host, theirs in one.hosts.items():
            hosts.setdefault(host, set()).update(theirs)
    on_hosts = {host: tuple(sorted(theirs)) for host, theirs in sorted(hosts.items())}
    return _placed(verdict, lead.changed(hosts=on_hosts), tuple(sorted(ranks)), coordinates)


def _placed(verdict: Verdict, lead: Lead, ranks: tuple[int, ...], coordinates: Coordinates) -> Verdict:
    place = place_text(ranks, coordinates)
    placed = lead.changed(ranks=ranks, place=place)
    if verdict.lead is None or placed == verdict.lead:
        return verdict
    summary = leading.summary(placed) if verdict.summary == leading.summary(verdict.lead) else verdict.summary
    return verdict.changed(lead=placed, summary=summary)


def _said(lead: Lead) -> tuple[object, ...]:
    return lead.cause, lead.says, lead.line, lead.is_rank_known


def _everywhere(verdict: Verdict, lead: Lead) -> tuple[int, ...]:
    """The ranks of a lead, and those of the same difference in other domains; of a branch its own alone."""
    if lead.parted is not None:
        return lead.ranks
    found = set(lead.ranks)
    for one in map(leading.of_divergence, filter(lambda divergence: divergence.is_red, verdict.divergences)):
        if _said(one) == _said(lead):
            found.update(one.ranks)
    return tuple(sorted(found))


def place_text(ranks: Sequence[int], coordinates: Coordinates) -> str:
    """`all with pp = 1`, `at dp 2, tp 5` of one rank; empty where ranks follow no coordinate, or there is one axis."""
    known = [coordinates[rank] for rank in ranks if rank in coordinates]
    values = _values(coordinates.values())
    axes = [axis for axis, seen in values.items() if len(seen) > 1]
    if len(axes) < 2 or not ranks or len(known) < len(ranks):
        return ""
    if len(ranks) == 1:
        return "at " + ", ".join(f"{axis} {known[0][axis]}" for axis in axes)
    own = _values(known)
    is_product = math.prod(len(own[axis]) for axis in axes) == len(ranks)
    follows = [axis for axis in axes if own[axis] != values[axis]]
    if not is_product or not follows or len(follows) == len(axes):  # along no axis are they all there
        return ""
    return "all with " + ", ".join(f"{axis} = {ranks_text(sorted(own[axis]))}" for axis in follows)


def _values(places: Iterable[Mapping[str, int]]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for place in places:
        for axis, at in place.items():
            found.setdefault(axis, set()).add(at)
    return found
