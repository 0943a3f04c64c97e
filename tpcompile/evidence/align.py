"""Compiles of several ranks -> slots of compiles that belong together.

By content and call, never by compile-id label: two ranks may compile the same two graphs in the opposite order,
and a rank that compiled something extra shifts every later label.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from tpcompile.evidence.byrank import ByRank, Groups
from tpcompile.evidence.records import CompileDigest, Layer, RankDigest
from tpcompile.evidence.several import find, first, phrase


@dataclass
class Slot:
    """One compile as all ranks saw it; a rank that is absent did not compile it."""

    phase: str
    frame: str
    taken: dict[int, CompileDigest] = field(default_factory=dict)
    """By rank; those that `align` has put here."""

    @property
    def compiles(self) -> ByRank[CompileDigest]:
        """The compile of every rank that made it."""
        return ByRank(self.taken)

    @property
    def where(self) -> str:
        """Name for the reader: phase, compile ids and frame; empty for what belongs to the rank itself."""
        if not self.frame:
            return ""
        labels = sorted({compile_.compile_id for compile_ in self.taken.values()})
        return phrase(self.phase, f"compile {'/'.join(labels)} of {self.frame}")

    @property
    def step(self) -> int | None:
        """Step of the run, None when nobody counted."""
        return first(self.compiles.found(lambda compile_: compile_.step).values())

    @property
    def keys(self) -> list[tuple[Layer, str]]:
        """Layers and parts that any rank observed."""
        shas = [compile_.shas for compile_ in self.compiles.values()]
        return list(dict.fromkeys(itertools.chain.from_iterable(shas)))

    @property
    def differing(self) -> list[tuple[Layer, str]]:
        """Layers and parts of which the ranks that observed them have different hashes."""
        return [key for key in self.keys if len(self.groups(*key)) > 1]

    def groups(self, layer: Layer, part: str = "") -> Groups:
        """Ranks by equal hash of a layer; those that did not observe it are left out."""
        return self.compiles.found(lambda compile_: compile_.sha(layer, part)).groups()

    @property
    def is_resumed(self) -> bool:
        """True for what Dynamo compiles behind a graph break."""
        return self.frame.startswith("torch_dynamo_resume_in_")


def content(compile_: CompileDigest) -> tuple[str, ...]:
    """Identity of a compile: its program, not its label."""
    shas = compile_.shas
    return tuple(shas.get((layer, ""), "") for layer in (Layer.GRAPH, Layer.GUARDS, Layer.INPUTS))


def align(ranks: Sequence[RankDigest]) -> list[Slot]:
    """Put every compile of every rank into exactly one slot.

    Best match first: same content in the same call and step, same content in the same call, same content in another
    call, same frame in the same call, same graph; a compile that matches nothing opens a slot of its own.
    """
    slots: list[Slot] = []
    for rank in ranks:
        left = list(rank.compiles)
        for key in _PASSES:
            left = _unplaced(slots, rank.rank, left, key)
        slots += [Slot(c.phase, c.frame, {rank.rank: c}) for c in left]
    return slots


_Key = Callable[[CompileDigest], Hashable]
_PASSES: tuple[_Key, ...] = (
    lambda c: (content(c), c.phase, c.frame, c.step),
    lambda c: (content(c), c.phase, c.frame),
    lambda c: (content(c), c.frame),
    lambda c: (c.phase, c.frame),
    lambda c: (c.sha(Layer.GRAPH), c.phase),
)


def _unplaced(slots: Sequence[Slot], rank: int, compiles: Sequence[CompileDigest], key: _Key) -> list[CompileDigest]:
    """Put compiles into the first free slot with an equal key; those without one are returned."""
    free = _by_key([slot for slot in slots if rank not in slot.taken], key)
    left = []
    for compile_ in compiles:
        candidates = free.get(key(compile_), iter(()))
        slot = find(candidates, lambda slot: rank not in slot.taken)
        if slot is None:
            left.append(compile_)
        else:
            slot.taken[rank] = compile_
    return left


def _by_key(slots: Sequence[Slot], key: _Key) -> dict[Hashable, Iterator[Slot]]:
    """The slots that hold a compile of that key, each to be tried once."""
    found: dict[Hashable, dict[int, Slot]] = {}
    for number, slot in enumerate(slots):
        for compile_ in slot.taken.values():
            found.setdefault(key(compile_), {})[number] = slot
    return {name: iter(same.values()) for name, same in found.items()}
