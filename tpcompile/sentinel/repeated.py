"""Collectives of a rank, in order -> the steps that it repeats, and which collective was due: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.sentinel.messages import Issued, Place


@dataclass(frozen=True)
class Repeated:
    """A step that was made at least twice in a row."""

    step: tuple[Issued, ...]
    """The collectives of the last one."""
    end: int
    """Index of the collective that follows."""

    def has(self, issued: Issued) -> bool:
        """True when a step contains a collective from the same lines."""
        return issued.place in [one.place for one in self.step]

    def due(self, index: int) -> Issued:
        """The collective at a later index, if further steps are equal."""
        return self.step[(index - self.end) % len(self.step)]


def repeated_before(issued: Sequence[Issued], end: int) -> list[Repeated]:
    """The steps that were made twice just before that index, the shortest first: one may repeat parts of itself."""
    places = [one.place for one in issued[:end]]
    lengths = [length for length in range(1, end // 2 + 1) if _is_made_twice(places, length)]
    return [Repeated(tuple(issued[end - length : end]), end) for length in lengths]


def _is_made_twice(places: Sequence[Place], length: int) -> bool:
    return places[-length:] == places[-2 * length : -length]
