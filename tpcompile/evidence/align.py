"""Compiles of several ranks -> slots of compiles that belong together.

By content and call, never by compile-id label: two ranks may compile the same two graphs in the opposite order,
and a rank that compiled something extra shifts every later label.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from tpcompile.evidence.domain import group_by
from tpcompile.evidence.layerspec import Groups
from tpcompile.evidence.records import CompileDigest, Layer, RankDigest
from tpcompile.evidence.several import first, phrase


@dataclass
class Slot:
    """One compile as all ranks saw it; a rank that is absent did not compile it."""

    phase: str
    frame: str
    compiles: dict[int, CompileDigest] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Name for the reader: phase, compile ids and frame; empty for what belongs to the rank itself."""
        if not self.frame:
            return ""
        labels = "/".join(sorted({c.compile_id for c in self.compiles.values()}))
        return phrase(self.phase, f"compile {labels} of {self.frame}")

    @property
    def step(self) -> int | None:
        """Step of the run, None when nobody counted."""
        return first(c.step for c in self.compiles.values() if c.step is not None)

    @property
    def keys(self) -> list[tuple[Layer, str]]:
        """Layers and parts that any rank observed."""
        return list(dict.fromkeys((d.layer, d.part) for c in self.compiles.values() for d in c.layers))

    def groups(self, layer: Layer, part: str = "") -> Groups:
        """Ranks by equal hash of a layer; those that did not observe it are left out."""
        shas = {rank: compile_.sha(layer, part) for rank, compile_ in self.compiles.items()}
        return group_by({rank: sha for rank, sha in shas.items() if sha is not None})

    @property
    def is_resumed(self) -> bool:
        """True for what Dynamo compiles behind a graph break."""
        return self.frame.startswith("torch_dynamo_resume_in_")


def content(compile_: CompileDigest) -> tuple[str, ...]:
    """Identity of a compile: its program, not its label."""
    return tuple(compile_.sha(layer) or "" for layer in (Layer.GRAPH, Layer.GUARDS, Layer.INPUTS))


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
    free: dict[Hashable, deque[Slot]] = {}
    for slot in slots:
        if rank not in slot.compiles:
            for found in {key(other) for other in slot.compiles.values()}:
                free.setdefault(found, deque()).append(slot)
    left = []
    for compile_ in compiles:
        candidates = free.get(key(compile_), deque())
        while candidates and rank in candidates[0].compiles:
            candidates.popleft()
        if candidates:
            candidates.popleft().compiles[rank] = compile_
        else:
            left.append(compile_)
    return left
