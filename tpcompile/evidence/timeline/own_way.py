"""What one rank executed, and what it left out -> the branch at which it went another way than it did before: pure.

For a rank that is compared with nobody: the other ranks run different programs, or did not record what they executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tpcompile.evidence.iterables import first, last
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.timeline.expect import num_equal
from tpcompile.evidence.timeline.walk import Fork, Place, Step, Walks, follow, forks, is_line, place_of

_EARLIER = 8
"""Earlier passes that the last one is compared with."""


class OwnFork(NamedTuple):
    """Where a rank went another way than before."""

    fork: Fork
    """Its two sides are those below."""
    usual: Sequence[Step]
    """What it did in an earlier pass, from the line that it left out to the next time that it came there."""
    now: Sequence[Step]
    """What it did after the last time."""


def own_fork(walks: Walks, rank: int, left_out: UserLine, *, may_return: bool = False) -> OwnFork | None:
    """The branch that led the rank past `left_out`, a line that it executed before; None where it did as before.

    Of the earlier passes the one counts to which the last one is equal for longest. A rank that `may_return` is back in
    lines that it executed before, and the first branch counts.
    """
    steps = walks.steps[rank]
    passes = [at for at, step in enumerate(steps) if is_line(step) and _is_at(walks, place_of(step), left_out)]
    begin, earlier = (passes or [0])[-1], list(pairwise(passes))[-_EARLIER:]
    frames: list[Place] = []
    for step in steps[:begin]:
        follow(frames, step)
    now = steps[begin:]
    found: list[tuple[int, list[Fork], Sequence[Step]]] = []
    for start, end in earlier:
        usual = steps[start : end + 1]
        found.append((num_equal(usual, now), list(forks(usual, now, (0, 0), frames)), usual))
    _, parted, usual = max(found, key=lambda one: one[0], default=(0, [], now))
    final = first(parted) if may_return else last([fork for fork in parted if fork.is_final])
    return OwnFork(final, usual, now) if final is not None else None  # else it may be on its way there


def _is_at(walks: Walks, place: Place, line: UserLine) -> bool:
    return (walks.codes[place[0]].file, place[1]) == (line.file, line.line)
