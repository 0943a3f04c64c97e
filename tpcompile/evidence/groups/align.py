"""Compiles of several ranks -> slots of compiles that correspond.

Compiles are matched by content and call, never by compile id: two ranks may compile the same two graphs in opposite
order, and an extra compile on one rank shifts every later id.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from tpcompile.evidence.groups.by_rank import ByRank, Groups
from tpcompile.evidence.iterables import find, first, grouped
from tpcompile.evidence.records import CompileDigest, Layer, RankDigest
from tpcompile.evidence.records.digest import CallPath
from tpcompile.evidence.text.phrases import phrase


@dataclass
class Slot:
    """One compile on all ranks that made it."""

    phase: str
    frame: str
    taken: dict[int, CompileDigest] = field(default_factory=dict)
    """Rank -> its compile, as `align` has placed it."""

    @property
    def compiles(self) -> ByRank[CompileDigest]:
        """The compile of every rank that made it."""
        return ByRank(self.taken)

    @property
    def where(self) -> str:
        """Phase, compile ids and frame, for reports; empty for the environment of a rank."""
        if not self.frame:
            return ""
        labels = sorted({compile_.compile_id for compile_ in self.taken.values()})
        return phrase(self.phase, f"compile {'/'.join(labels)} of {self.frame}")

    @property
    def step(self) -> int | None:
        """Step of the run, None when steps were not counted."""
        return first(self.compiles.found(lambda compile_: compile_.step).values())

    @property
    def differing(self) -> list[tuple[Layer, str]]:
        """Layers and parts whose hashes differ between the ranks that observed them."""
        shas = [compile_.shas for compile_ in self.compiles.values()]
        keys = dict.fromkeys(itertools.chain.from_iterable(shas))
        return [key for key in keys if len(self.groups(*key)) > 1]

    def groups(self, layer: Layer, part: str = "") -> Groups:
        """Groups of ranks with equal hashes of a layer; ranks that did not observe it are left out."""
        return self.compiles.found(lambda compile_: compile_.sha(layer, part)).groups()


def content(compile_: CompileDigest) -> tuple[str, ...]:
    """Identity of a compile: the hashes of its graph, guards and inputs, not its compile id."""
    shas = compile_.shas
    return tuple(shas.get((layer, ""), "") for layer in (Layer.GRAPH, Layer.GUARDS, Layer.INPUTS))


def align(ranks: Sequence[RankDigest]) -> list[Slot]:
    """Put every compile of every rank into exactly one slot.

    Best match first: same content in the same call and step, same content in the same call, same content in a
    different call, same frame in the same call from the same line, same frame in the same call, same graph; a compile
    without a match gets a slot of its own.
    """
    # By all that `_passes` looks at: ranks in which it is equal have their compiles in the same slots.
    alike = grouped(
        ranks,
        lambda digest: tuple((content(one), one.phase, one.frame, one.step, one.call_path) for one in digest.compiles),
    )
    passes = _passes([digests[0] for digests in alike.values()])
    placed = _Placed(len(passes))
    for first_of, *others in alike.values():
        left = [(compile_, [key(compile_) for key in passes]) for compile_ in first_of.compiles]
        for number in range(len(passes)):
            left = placed.unmatched(first_of.rank, left, number)
        for compile_, keys in left:
            placed.add(first_of.rank, compile_, keys)
        placed.follow(first_of, others)
    return placed.slots


_Key = Callable[[CompileDigest], Hashable]
_Keyed = tuple[CompileDigest, list[Hashable]]
"""A compile and its key in every pass."""


def _passes(ranks: Sequence[RankDigest]) -> tuple[_Key, ...]:
    """What must be equal, best match first.

    A call that all ranks make from one line is never that of a rank which calls the function from a line of its own; of
    a compile that the recompile limit prevented, torch logs no caller.
    """
    calls = [{(c.frame, c.call_path) for c in digest.compiles} for digest in ranks]
    common = set[tuple[str, CallPath]]()
    if calls:
        common = set.intersection(*calls)

    def is_common(compile_: CompileDigest) -> bool:
        return not compile_.call_path or (compile_.frame, compile_.call_path) in common

    return (
        lambda c: (content(c), c.phase, c.frame, c.step),
        lambda c: (content(c), c.phase, c.frame),
        lambda c: (content(c), c.frame),
        lambda c: (c.phase, c.frame, c.call_path),
        lambda c: (c.phase, c.frame, is_common(c)),
        lambda c: (c.sha(Layer.GRAPH), c.phase, is_common(c)),
    )


class _Placed:
    """The slots so far, found by the keys of their compiles: nothing is computed again for the next rank."""

    def __init__(self, num_passes: int) -> None:
        self.slots: list[Slot] = []
        self.numbers: list[dict[Hashable, list[int]]] = [{} for _ in range(num_passes)]
        """Key -> numbers of the slots that hold a compile with it, in order; one table per pass."""

    def unmatched(self, rank: int, compiles: Sequence[_Keyed], number: int) -> list[_Keyed]:
        """Put compiles into the first free slot with an equal key in that pass; return those without one."""
        by_key: dict[Hashable, Iterator[int]] = {}
        left: list[_Keyed] = []
        for compile_, keys in compiles:
            key = keys[number]
            # Each slot is tried once: one that this rank has taken stays taken.
            candidates = by_key.setdefault(key, iter(self.numbers[number].get(key, ())))
            slot = find(candidates, lambda at: rank not in self.slots[at].taken)
            if slot is None:
                left.append((compile_, keys))
            else:
                self.put(slot, rank, compile_, keys)
        return left

    def add(self, rank: int, compile_: CompileDigest, keys: Sequence[Hashable]) -> None:
        """A slot of its own."""
        self.slots.append(Slot(compile_.phase, compile_.frame))
        self.put(len(self.slots) - 1, rank, compile_, keys)

    def follow(self, first_of: RankDigest, others: Sequence[RankDigest]) -> None:
        """Put the compiles of these ranks into the slots of one with the same compiles."""
        slot_of = {id(slot.taken.get(first_of.rank)): slot for slot in self.slots}
        slots = [slot_of[id(compile_)] for compile_ in first_of.compiles]
        for digest in others:
            for slot, compile_ in zip(slots, digest.compiles, strict=True):
                slot.taken[digest.rank] = compile_

    def put(self, slot: int, rank: int, compile_: CompileDigest, keys: Sequence[Hashable]) -> None:
        self.slots[slot].taken[rank] = compile_
        for numbers, key in zip(self.numbers, keys, strict=True):
            found = numbers.setdefault(key, [])
            at = bisect.bisect_left(found, slot)
            there = found[at : at + 1]
            if there != [slot]:
                found.insert(at, slot)
