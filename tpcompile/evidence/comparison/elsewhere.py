"""Differences in which no side has a majority -> those that other domains decide: what they have, too, is not at fault.

With two ranks in each domain, as of tensor parallelism over two GPUs, a vote within the domain never decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpcompile.evidence.records import Divergence, Layer, RankDigest, RankGroup

_Content = tuple[tuple[str, str, str], ...]


def decided_elsewhere(found: Iterable[Divergence], digests: Sequence[RankDigest]) -> list[Divergence]:
    """The differences; the sides of one whose ranks only differ are ordered by what the other domains have."""
    by_rank = {digest.rank: digest for digest in digests}
    return [_decided(divergence, by_rank) for divergence in found]


def _decided(divergence: Divergence, by_rank: dict[int, RankDigest]) -> Divergence:
    is_open = divergence.is_red and not divergence.culprits and len(divergence.groups) > 1
    if not is_open:
        return divergence
    others = [digest for digest in by_rank.values() if digest.domain != divergence.domain]
    known = {_content(digest, divergence.layer) for digest in others} - {()}
    right: list[RankGroup] = []
    for group in divergence.groups:
        contents = {_content(by_rank[rank], divergence.layer) for rank in group.ranks if rank in by_rank}
        if contents and contents <= known:
            right.append(group)
    if len(right) != 1:
        return divergence
    odd = [group for group in divergence.groups if group is not right[0]]
    return divergence.model_copy(update={"groups": (*right, *odd), "is_rank_known": True})


def _content(digest: RankDigest, layer: Layer) -> _Content:
    """What a rank has of a layer, as hashes, of all that it compiled; empty where it was not observed."""
    return tuple(
        (compile_.frame, one.part, one.sha256)
        for compile_ in digest.compiles
        for one in compile_.layers
        if one.layer == layer
    )
