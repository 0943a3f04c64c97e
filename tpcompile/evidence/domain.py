"""Ranks that must agree: their digests, what they are asked for, and what is allowed to differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tpcompile.evidence.layerspec import Groups, Row
from tpcompile.evidence.records import CompileDigest, Item, Layer, RankDigest, RankGroup
from tpcompile.evidence.several import grouped

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

    def observed(self, rank: int, compile_: CompileDigest, layer: Layer) -> tuple[Item, ...]:
        """The same of a compile, only where the rank observed the layer."""
        return () if compile_.sha(layer) is None else self.items(rank, compile_.index, layer)

    def reason(self, layer: Layer, row: Row) -> str:
        """Why the allow-list says that this difference is intended; empty when it does not."""
        return reason_for(layer, row.present, self.allowed)

    @property
    def is_cut(self) -> bool:
        """True when the log of any rank ends early."""
        return any(digest.is_cut for digest in self.ranks)

    def of_rank(self, rank: int) -> RankDigest:
        """The digest of a rank."""
        return next(d for d in self.ranks if d.rank == rank)


def reason_for(layer: Layer, items: Iterable[Item], allowed: Allowed) -> str:
    """Why the allow-list says that these items may differ: every one has its text; empty when it does not."""
    texts = [item.text for item in items]
    for allowed_layer, contains, reason in allowed:
        if allowed_layer == layer and all(contains in text for text in texts):
            return reason
    return ""


def by_domain(digests: Iterable[RankDigest]) -> dict[str, list[RankDigest]]:
    """Domain -> digests of its ranks, both in order."""
    in_order = sorted(digests, key=lambda digest: (digest.domain, digest.rank))
    return grouped(in_order, lambda digest: digest.domain)


def group_by(values: Mapping[int, Hashable]) -> Groups:
    """Ranks by equal value, largest group first: the odd ones out come last."""
    groups = grouped(sorted(values), values.__getitem__)
    return tuple(sorted(map(tuple, groups.values()), key=lambda ranks: (-len(ranks), ranks[0])))


def sides(groups: Groups, row: Iterable[Item | None]) -> tuple[RankGroup, ...]:
    """Groups of ranks, each with what it has."""
    return tuple(RankGroup(ranks=ranks, item=item) for ranks, item in zip(groups, row, strict=True))
