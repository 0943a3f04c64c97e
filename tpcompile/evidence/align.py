"""Compiles of several ranks -> slots of compiles that belong together.

By content and call, never by compile-id label: two ranks may compile the same two graphs in the opposite order,
and a rank that compiled something extra shifts every later label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tpcompile.evidence.records import CompileDigest, Layer, RankDigest


@dataclass
class Slot:
    """One compile as all ranks saw it; a rank that is absent did not compile it."""

    phase: str
    frame: str
    compiles: dict[int, CompileDigest] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Name for the reader: phase, compile ids and frame."""
        labels = "/".join(sorted({c.compile_id for c in self.compiles.values()}))
        return f"{self.phase + ', ' if self.phase else ''}compile {labels} of {self.frame}"

    @property
    def step(self) -> int | None:
        """Step of the run, None when nobody counted."""
        return next((c.step for c in self.compiles.values() if c.step is not None), None)

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
        for matches in _PASSES:
            left = [c for c in left if not _place(slots, rank.rank, c, matches)]
        slots += [Slot(c.phase, c.frame, {rank.rank: c}) for c in left]
    return slots


def _place(slots: list[Slot], rank: int, compile_: CompileDigest, matches: _Match) -> bool:
    for slot in slots:
        if rank not in slot.compiles and any(matches(other, compile_) for other in slot.compiles.values()):
            slot.compiles[rank] = compile_
            return True
    return False


_Match = Callable[[CompileDigest, CompileDigest], bool]
_PASSES: tuple[_Match, ...] = (
    lambda a, b: content(a) == content(b) and (a.phase, a.frame, a.step) == (b.phase, b.frame, b.step),
    lambda a, b: content(a) == content(b) and (a.phase, a.frame) == (b.phase, b.frame),
    lambda a, b: content(a) == content(b) and a.frame == b.frame,
    lambda a, b: (a.phase, a.frame) == (b.phase, b.frame),
    lambda a, b: a.sha(Layer.GRAPH) == b.sha(Layer.GRAPH) and a.phase == b.phase,
)
