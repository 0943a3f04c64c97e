"""Ranks that must agree: their digests, what they are asked for, and what is allowed to differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tpcompile.evidence.layerspec import Groups, Row
from tpcompile.evidence.records import Item, Layer, RankDigest, RankGroup

Allowed = Sequence[tuple[str, str, str]]
"""(layer, text the item contains, reason) of every intended difference."""

Fetch = Callable[[int, int, Layer, str], Sequence[Item]]
"""(rank, compile index, layer, part) -> items; index -1 is the rank itself, for the environment."""


@dataclass
class Domain:
    """Ranks that must agree."""

    name: str
    ranks: Sequence[RankDigest]
    fetch: Fetch
    allowed: Allowed = ()
    _known: dict[tuple[int, int, Layer, str], tuple[Item, ...]] = field(default_factory=dict)

    def items(self, rank: int, index: int, layer: Layer, part: str = "") -> tuple[Item, ...]:
        """What a rank has in one layer of one compile; asked for once."""
        key = rank, index, layer, part
        if key not in self._known:
            self._known[key] = tuple(self.fetch(*key))
        return self._known[key]

    def reason(self, layer: Layer, row: Row) -> str:
        """Why the allow-list says that this difference is intended; empty when it does not."""
        texts = [item.text for item in row.present]
        for allowed_layer, contains, reason in self.allowed:
            if allowed_layer == layer and all(contains in text for text in texts):
                return reason
        return ""

    def of_rank(self, rank: int) -> RankDigest:
        """The digest of a rank."""
        return next(d for d in self.ranks if d.rank == rank)


def by_domain(digests: Iterable[RankDigest]) -> dict[str, list[RankDigest]]:
    """Domain -> digests of its ranks, both in order."""
    found: dict[str, list[RankDigest]] = {}
    for digest in sorted(digests, key=lambda digest: (digest.domain, digest.rank)):
        found.setdefault(digest.domain, []).append(digest)
    return found


def group_by(values: Mapping[int, Hashable]) -> Groups:
    """Ranks by equal value, largest group first: the odd ones out come last."""
    groups: dict[Hashable, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return tuple(sorted(map(tuple, groups.values()), key=lambda ranks: (-len(ranks), ranks[0])))


def sides(groups: Groups, row: Iterable[Item | None]) -> tuple[RankGroup, ...]:
    """Groups of ranks, each with what it has."""
    return tuple(RankGroup(ranks=ranks, item=item) for ranks, item in zip(groups, row, strict=True))
