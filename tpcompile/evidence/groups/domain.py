"""Ranks that must agree: their digests, their items, and the differences that are allowed."""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tpcompile.evidence.groups.align import content
from tpcompile.evidence.groups.by_group import ByGroup, Row
from tpcompile.evidence.groups.by_rank import ByRank, Groups
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import CompileDigest, Item, Layer, RankDigest, RankGroup
from tpcompile.evidence.records.digest import CallPath

Allowed = Sequence[tuple[str, str, str]]
"""(layer, text the item contains, reason) of every intended difference."""

Fetch = Callable[[int, int, Layer, str], Sequence[Item]]
"""(rank, compile index, layer, part) -> items; index -1 is the rank itself, for the environment."""


class Compiles:
    """The compiles of one rank, by what they are looked up by."""

    def __init__(self, digest: RankDigest) -> None:
        self.newest: dict[str, CompileDigest] = {}
        """Frame -> the last compile of it."""
        self.newest_like: dict[tuple[str, tuple[str, ...]], CompileDigest] = {}
        """Frame and content -> the last compile of it."""
        self.newest_called: dict[str, CompileDigest] = {}
        """Compile id -> the last compile with it: ids start over after a reset."""
        self.call_paths: dict[str, set[CallPath]] = {}
        """Frame -> the lines from which it was called, where they are known."""
        self.is_counted = bool(digest.regions)
        """True when calls were counted."""
        self._calls = Counter({(region.phase, _place(region.name)): region.hits for region in digest.regions})
        """Phase and place of a frame -> calls: those that hit what was compiled, and those that compiled."""
        self._called: dict[tuple[str, str], list[CompileDigest]] = {}
        for compile_ in digest.compiles:
            self.newest[compile_.frame] = compile_
            self.newest_like[compile_.frame, content(compile_)] = compile_
            self.newest_called[compile_.compile_id] = compile_
            self._calls[compile_.phase, _place(compile_.frame)] += 1
            paths = self.call_paths.setdefault(compile_.frame, set())
            if compile_.call_path:
                paths.add(compile_.call_path)
            self._called.setdefault((compile_.frame, compile_.compile_id), []).append(compile_)

    def num_calls(self, phase: str, frame: str) -> int:
        """Number of calls of the frame in the phase, as far as calls were counted."""
        return self._calls[phase, _place(frame)]

    def before(self, compile_: CompileDigest, compile_id: str) -> CompileDigest | None:
        """The newest earlier compile of the same frame with that id."""
        called = self._called.get((compile_.frame, compile_id), [])
        number = bisect.bisect_left(called, compile_.index, key=lambda one: one.index)
        return called[number - 1] if number else None


def _place(frame: str) -> str:
    """`app/model.py:3` of `forward app/model.py:3`: what was compiled is named with its class, a frame without."""
    return frame.rpartition(" ")[2]


@dataclass
class Domain:
    """Ranks that must agree."""

    name: str
    ranks: Sequence[RankDigest]
    fetch: Fetch
    allowed: Allowed = ()
    is_running: bool = False
    """The ranks continue after this comparison: what one of them has not done yet may follow."""
    _known: dict[tuple[int, int, Layer, str], tuple[Item, ...]] = field(default_factory=dict)

    _compiled: dict[int, Compiles] = field(default_factory=dict)

    def items(self, rank: int, index: int, layer: Layer, part: str = "") -> tuple[Item, ...]:
        """The items of a rank in one layer of one compile; fetched once."""
        key = rank, index, layer, part
        if key not in self._known:
            self._known[key] = tuple(self.fetch(*key))
        return self._known[key]

    def reason(self, layer: Layer, row: Row) -> str:
        """The allow-list's reason for this difference; empty when it is not declared."""
        return reason_for([layer], [item.text for item in row.present], self.allowed)

    @property
    def is_cut(self) -> bool:
        """True when the log of at least one rank ends early."""
        return any(digest.is_cut for digest in self.ranks)

    @functools.cached_property
    def digests(self) -> ByRank[RankDigest]:
        """The digest of each rank."""
        return ByRank({digest.rank: digest for digest in self.ranks})

    def coordinates(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Coordinates of these ranks in the domain."""
        return tuple(self.digests[rank].coordinate for rank in ranks)

    def leaders(self, compiles: ByRank[CompileDigest], groups: Groups) -> ByGroup[Seen]:
        """One compile on the first rank of each group."""
        return ByGroup(Seen(self, ranks[0], compiles[ranks[0]]) for ranks in groups)

    def compiled(self, rank: int) -> Compiles:
        """The compiles of a rank, by what they are looked up by."""
        if rank not in self._compiled:
            self._compiled[rank] = Compiles(self.digests[rank])
        return self._compiled[rank]


@dataclass(frozen=True)
class Seen:
    """One compile on one rank."""

    domain: Domain
    rank: int
    compile: CompileDigest

    @property
    def digest(self) -> RankDigest:
        """The digest of the rank."""
        return self.domain.digests[self.rank]

    def items(self, layer: Layer, part: str = "") -> tuple[Item, ...]:
        """The items of one layer."""
        return self.domain.items(self.rank, self.compile.index, layer, part)

    def observed(self, layer: Layer) -> tuple[Item, ...]:
        """The items of one layer; empty where the rank did not observe it."""
        return () if self.compile.sha(layer) is None else self.items(layer)


def reason_for(layers: Collection[str], texts: Sequence[str], allowed: Allowed) -> str:
    """The allow-list's reason why these texts of one of the layers may differ; empty when it has none."""
    for layer, contains, reason in allowed:
        if layer in layers and all(contains in text for text in texts):
            return reason
    return ""


def by_domain(digests: Iterable[RankDigest]) -> dict[str, list[RankDigest]]:
    """Domain -> digests of its ranks, both in order."""
    in_order = sorted(digests, key=lambda digest: (digest.domain, digest.rank))
    return grouped(in_order, lambda digest: digest.domain)


def sides(groups: Groups, row: Iterable[Item | None]) -> tuple[RankGroup, ...]:
    """The groups of ranks with their items, for a divergence."""
    return tuple(RankGroup(ranks=ranks, item=item) for ranks, item in zip(groups, row, strict=True))
