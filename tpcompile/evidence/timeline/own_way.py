"""What one rank executed, and what it left out -> the branch at which it went another way than it did before: pure.

For a rank that is compared with nobody: the other ranks run different programs, or did not record what they executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tpcompile.evidence.iterables import first, last
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.timeline.expect import contexts_before, num_equal
from tpcompile.evidence.timeline.walk import Fork, Place, Step, Walks, follow, forks, is_line, place_of

_EARLIER = 8
"""Earlier passes that the last one is compared with."""
_HISTORY, _LOOKED_AT = 2048, 256
"""Steps that tell what is due, and steps after the last pass that are compared with it; it costs their product."""


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
    if final is not None:
        return OwnFork(final, usual, now)
    return None if may_return else _too_early(walks, steps, begin, frames, left_out)  # else it may be on its way there


def own_pass(walks: Walks, rank: int, left_out: UserLine) -> OwnFork | None:
    """The newest way from one time at `left_out` to the next that is like none before: it came there one time less."""
    steps = walks.steps[rank]
    passes = [at for at, step in enumerate(steps) if is_line(step) and _is_at(walks, place_of(step), left_out)]
    ways = [tuple(steps[begin : end + 1]) for begin, end in pairwise(passes)]
    for at in range(len(ways) - 1, max(0, len(ways) - _EARLIER), -1):
        before = ways[:at]
        if ways[at] in before:
            continue
        frames: list[Place] = []
        for step in steps[: passes[at]]:
            follow(frames, step)
        usual = max(before, key=lambda way: num_equal(way, ways[at]))
        parted = first(forks(usual, ways[at], (0, 0), frames))
        if parted is not None:
            return OwnFork(parted, usual, ways[at])
    return None


def own_detour(steps: Sequence[Step], apart: Sequence[Fork]) -> OwnFork | None:
    """The newest detour of a rank that is like none before it, beside the one that it is like for longest.

    `apart` are the places at which the rank parts from another one that does not go there.
    """
    kinds: dict[tuple[Place, tuple[Step, ...]], Fork] = {}
    for fork in apart:
        kinds.setdefault((fork.branch, tuple(steps[fork.starts[0] : fork.ends[0]])), fork)
    in_order = list(kinds.items())
    for at in range(len(in_order) - 1, 0, -1):
        (branch, now), fork = in_order[at]
        before = [way for (earlier, way), _ in in_order[:at] if earlier == branch]
        if not before:
            continue
        usual = max(before, key=lambda way: num_equal(way, now))
        frames: list[Place] = []
        for step in steps[: fork.starts[0]]:
            follow(frames, step)
        parted = first(forks(usual, now, (0, 0), frames))
        if parted is not None:
            return OwnFork(parted, usual, now)
    return None


def _too_early(
    walks: Walks, steps: Sequence[Step], begin: int, frames: Sequence[Place], left_out: UserLine
) -> OwnFork | None:
    """The step after `begin` by which the rank left the line out that came next whenever all before was as now.

    A loop that ends one pass too early is left as it is each time; only what came before it says that it is too early.
    """
    oldest = max(0, begin - _HISTORY)
    for end in range(begin + 1, min(len(steps), begin + _LOOKED_AT)):
        past = steps[oldest:end]
        contexts = contexts_before(past)
        longest = max(contexts)
        due = [index for index, length in enumerate(contexts) if length == longest]
        is_told = longest > end - begin and len({past[index] for index in due}) == 1
        if is_told and past[due[-1]] != steps[end]:
            offset = end - begin
            usual, now = past[due[-1] - offset :], steps[begin:]
            found = first(forks(usual, now, (0, 0), frames))
            skipped = usual[found.starts[0] : found.ends[0]] if found is not None else ()
            if found is not None and any(is_line(step) and _is_at(walks, place_of(step), left_out) for step in skipped):
                return OwnFork(found, usual, now)
    return None


def _is_at(walks: Walks, place: Place, line: UserLine) -> bool:
    return (walks.codes[place[0]].file, place[1]) == (line.file, line.line)
