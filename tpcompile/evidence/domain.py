"""Ranks that must agree: their digests, what they are asked for, and what is allowed to differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tpcompile.evidence.bygroup import ByGroup, Row
from tpcompile.evidence.byrank import ByRank, Groups
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

    def reason(self, layer: Layer, row: Row) -> str:
        """Why the allow-list says that this difference is intended; empty when it does not."""
        return reason_for([layer], [item.text for item in row.present], self.allowed)

    @property
    def is_cut(self) -> bool:
        """True when the log of any rank ends early."""
        return any(digest.is_cut for digest in self.ranks)

    @functools.cached_property
    def digests(self) -> ByRank[RankDigest]:
        """The digest of each rank."""
        return ByRank({digest.rank: digest for digest in self.ranks})

    def coordinates(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Places of some ranks in the domain."""
        return tuple(self.digests[rank].coordinate for rank in ranks)

    def leaders(self, compiles: ByRank[CompileDigest], groups: Groups) -> ByGroup[Seen]:
        """One compile as the first rank of each group saw it."""
        return ByGroup(Seen(self, ranks[0], compiles[ranks[0]]) for ranks in groups)

    def seen_by(self, rank: int) -> list[Seen]:
        """The compiles of a rank, in order."""
        return [Seen(self, rank, compile_) for compile_ in self.digests[rank].compiles]


@dataclass(frozen=True)
class Seen:
    """One compile as a rank saw it."""

    domain: Domain
    rank: int
    compile: CompileDigest

    @property
    def digest(self) -> RankDigest:
        """All that is known of the rank."""
        return self.domain.digests[self.rank]

    def items(self, layer: Layer, part: str = "") -> tuple[Item, ...]:
        """What the rank has in one layer of it."""
        return self.domain.items(self.rank, self.compile.index, layer, part)

    def observed(self, layer: Layer) -> tuple[Item, ...]:
        """The same, only where the rank observed the layer."""
        return () if self.compile.sha(layer) is None else self.items(layer)


def reason_for(layers: Collection[str], texts: Sequence[str], allowed: Allowed) -> str:
    """Why the allow-list says for one of the layers that these texts may differ; empty when it does not."""
    for layer, contains, reason in allowed:
        if layer in layers and all(contains in text for text in texts):
            return reason
    return ""


def by_domain(digests: Iterable[RankDigest]) -> dict[str, list[RankDigest]]:
    """Domain -> digests of its ranks, both in order."""
    in_order = sorted(digests, key=lambda digest: (digest.domain, digest.rank))
    return grouped(in_order, lambda digest: digest.domain)


def sides(groups: Groups, row: Iterable[Item | None]) -> tuple[RankGroup, ...]:
    """Groups of ranks, each with what it has."""
    return tuple(RankGroup(ranks=ranks, item=item) for ranks, item in zip(groups, row, strict=True))
