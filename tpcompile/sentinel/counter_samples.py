"""Counters of one rank at selected calls of a region: which calls, and how many are kept."""

from __future__ import annotations

from collections import deque

from tpcompile.evidence.iterables import last
from tpcompile.evidence.records import Frozen, SkippedFrame, UserLine
from tpcompile.evidence.records.bounds import Number

_KEPT_FIRST, _KEPT_LAST = 48, 48
_STRIDES = (1, 2, 4, 12)
"""Samples are at multiples of these; 12 and its doubles are whole iterations of 2, 3, 4, 6 or 12 calls."""
_OFTEN_S, _RARE_S = 0.25, 1.0
"""Shortest and longest interval between samples, as far as calls allow."""
COLLECTIVES = "collectives of "
"""Prefix of counters of the collectives of a group; all other counters are loop variables."""


class Counted(Frozen):
    """What one rank recorded about one region."""

    region: str
    stack: tuple[UserLine, ...] = ()
    """The user's frames of a call of it, innermost last."""
    has_collectives: bool = False
    calls: Number = 0
    """Calls that entered it as one compiled region."""
    skipped: SkippedFrame | None = None
    """Code inside it that Dynamo skips: after those calls it ran as several compiled regions."""
    samples: dict[Number, dict[str, int]] = {}
    """Call -> value of each counter when the call began."""
    is_over: bool = False
    """The rank leaves: no more samples follow."""

    @property
    def line(self) -> UserLine | None:
        """The user's call."""
        return last(self.stack)

    @property
    def counters(self) -> set[str]:
        """All counters that were read."""
        return set().union(*self.samples.values())

    def values_of(self, counter: str) -> dict[int, int]:
        """Call -> value of that counter."""
        return {call: counters[counter] for call, counters in self.samples.items() if counter in counters}


class Samples:
    """The counters at selected calls of one region: the first calls, then multiples of a stride that adapts.

    Each rank chooses the stride by its own speed; multiples of the larger stride are common to all ranks.
    """

    def __init__(self) -> None:
        self.next_call = 1
        """The next call at which the counters are read."""
        self._level, self._stride, self._kept_at_s = 0, 1, 0.0
        self._first: list[tuple[int, dict[str, int]]] = []
        self._last: deque[tuple[int, dict[str, int]]] = deque(maxlen=_KEPT_LAST)

    def keep(self, call: int, counters: dict[str, int], now_s: float) -> None:
        """Record the counters at a call."""
        since_s, self._kept_at_s = now_s - self._kept_at_s, now_s
        if len(self._first) < _KEPT_FIRST:
            self._first.append((call, counters))
        else:
            self._last.append((call, counters))
            self._adapt(since_s)
        self.next_call = (call // self._stride + 1) * self._stride

    def _adapt(self, since_s: float) -> None:
        if since_s < _OFTEN_S:
            self._level += 1
        elif since_s > _RARE_S and self._level > 0:
            self._level -= 1
        doublings = max(0, self._level - len(_STRIDES) + 1)
        self._stride = _STRIDES[self._level - doublings] * 2**doublings

    def by_call(self) -> dict[int, dict[str, int]]:
        """Call -> counters; may be called from any thread."""
        return dict([*self._first, *self._last.copy()])
