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
    replicas = _Replicas(digests)
    return [replicas.decided(one) for one in found]


class _Replicas:
    """What the ranks compiled, and the domains that have replicas; each is looked at once."""

    def __init__(self, digests: Sequence[RankDigest]) -> None:
        self._by_rank = {digest.rank: digest for digest in digests}
        self._domains = by_domain(digests)
        self._contents: dict[tuple[int, Layer], _Content] = {}
        self._known: dict[tuple[str, Layer], set[_Content]] = {}

    def decided(self, divergence: Divergence) -> Divergence:
        """The divergence; where its ranks only differ, with the side first that the replicas have, too."""
        if not divergence.is_red or divergence.culprits or len(divergence.groups) < 2:
            return divergence
        ranks = [self._by_rank[rank] for rank in divergence.ranks if rank in self._by_rank]
        if not ranks or len(self._domains) < 2:
            return divergence
        known = self._of_replicas(ranks[0], divergence.layer)
        right: list[RankGroup] = []
        for group in divergence.groups:
            digests = [self._by_rank[rank] for rank in group.ranks if rank in self._by_rank]
            contents = {self._content(digest, divergence.layer) for digest in digests}
            if contents and contents <= known:
                right.append(group)
        if len(right) != 1:
            return divergence
        odd = [group for group in divergence.groups if group is not right[0]]
        return divergence.model_copy(update={"groups": (*right, *odd), "is_rank_known": True})

    def _of_replicas(self, here: RankDigest, layer: Layer) -> set[_Content]:
        """What the domains have whose place differs from this one along axes of replicas alone."""
        key = here.domain, layer
        if key not in self._known:
            self._known[key] = self._found_in_replicas(here, layer)
        return self._known[key]

    def _found_in_replicas(self, here: RankDigest, layer: Layer) -> set[_Content]:
        own = _place(here)
        others: list[tuple[_Place, _Content]] = []
        for name, ranks in self._domains.items():
            contents = {self._content(digest, layer) for digest in ranks}
            if name != here.domain and len(contents) == 1:
                others.append((_place(ranks[0]), contents.pop()))
        replicas = {axis for axis in own if _has_replicas(axis, others)}
        if not replicas:
            return set()
        stages = own.keys() - replicas
        return {content for place, content in others if all(place.get(axis) == own[axis] for axis in stages)} - {()}

    def _content(self, digest: RankDigest, layer: Layer) -> _Content:
        """What a rank has of a layer, as hashes, of all that it compiled; empty where it was not observed."""
        key = digest.rank, layer
        if key not in self._contents:
            self._contents[key] = tuple(
                (compile_.frame, one.part, one.sha256)
                for compile_ in digest.compiles
                for one in compile_.layers
                if one.layer == layer
            )
        return self._contents[key]


def _has_replicas(axis: str, domains: Sequence[tuple[_Place, _Content]]) -> bool:
    """True for an axis along which other domains are seen to be equal."""
    lines = grouped(domains, lambda one: tuple(at for name, at in one[0].items() if name != axis))
    compared = [{content for _, content in line} for line in lines.values() if len(line) > 1]
    return bool(compared) and all(len(contents) == 1 for contents in compared)


def _place(digest: RankDigest) -> _Place:
    """Where the domain is in the mesh."""
    return {axis: at for axis, at in sorted(digest.coordinates.items()) if axis != axis_of(digest.domain)}
