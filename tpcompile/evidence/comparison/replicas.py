"""Differences in which no side has a majority -> those that replicas of the domain decide.

With two ranks in each domain, as of tensor parallelism over two GPUs, a vote within the domain never decides. What its
replicas have compiled does; a different stage of a pipeline is no replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpcompile.evidence.groups.domain import by_domain
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import Divergence, Layer, RankDigest, RankGroup
from tpcompile.evidence.text.ranks import axis_of

_Content = tuple[tuple[str, str, str], ...]
_Place = dict[str, int]


def decided_by_replicas(found: Iterable[Divergence], digests: Sequence[RankDigest]) -> list[Divergence]:
    """The differences; of one whose ranks only differ, the side that the replicas have, too, comes first."""
    return [_decided(one, digests) if _is_open(one) else one for one in found]


def _is_open(divergence: Divergence) -> bool:
    return divergence.is_red and not divergence.culprits and len(divergence.groups) > 1


def _decided(divergence: Divergence, digests: Sequence[RankDigest]) -> Divergence:
    by_rank = {digest.rank: digest for digest in digests}
    ranks = [by_rank[rank] for rank in divergence.ranks if rank in by_rank]
    known = _contents_of_replicas(ranks, digests, divergence.layer) if ranks else set()
    right: list[RankGroup] = []
    for group in divergence.groups:
        contents = {_content(by_rank[rank], divergence.layer) for rank in group.ranks if rank in by_rank}
        if contents and contents <= known:
            right.append(group)
    if len(right) != 1:
        return divergence
    odd = [group for group in divergence.groups if group is not right[0]]
    return divergence.model_copy(update={"groups": (*right, *odd), "is_rank_known": True})


def _contents_of_replicas(here: Sequence[RankDigest], digests: Sequence[RankDigest], layer: Layer) -> set[_Content]:
    """What the domains have whose place differs from this one along axes of replicas alone."""
    own = _place(here[0])
    others: list[tuple[_Place, _Content]] = []
    for name, ranks in by_domain(digests).items():
        contents = {_content(digest, layer) for digest in ranks}
        if name != here[0].domain and len(contents) == 1:
            others.append((_place(ranks[0]), contents.pop()))
    replicas = {axis for axis in own if _has_replicas(axis, others)}
    if not replicas:
        return set()
    stages = own.keys() - replicas
    return {content for place, content in others if all(place.get(axis) == own[axis] for axis in stages)} - {()}


def _has_replicas(axis: str, domains: Sequence[tuple[_Place, _Content]]) -> bool:
    """True for an axis along which other domains are seen to be equal."""
    lines = grouped(domains, lambda one: tuple(at for name, at in one[0].items() if name != axis))
    compared = [{content for _, content in line} for line in lines.values() if len(line) > 1]
    return bool(compared) and all(len(contents) == 1 for contents in compared)


def _place(digest: RankDigest) -> _Place:
    """Where the domain is in the mesh."""
    return {axis: at for axis, at in sorted(digest.coordinates.items()) if axis != axis_of(digest.domain)}


def _content(digest: RankDigest, layer: Layer) -> _Content:
    """What a rank has of a layer, as hashes, of all that it compiled; empty where it was not observed."""
    return tuple(
        (compile_.frame, one.part, one.sha256)
        for compile_ in digest.compiles
        for one in compile_.layers
        if one.layer == layer
    )
