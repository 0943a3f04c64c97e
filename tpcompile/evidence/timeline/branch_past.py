"""The ways that all ranks went at a branch before -> the way that is due there, if the past tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

from tpcompile.evidence.timeline.expect import contexts_before
from tpcompile.evidence.timeline.flow import Kind
from tpcompile.evidence.timeline.reasons import last_pass
from tpcompile.evidence.timeline.walk import Fork, Step, is_line, kind_of, place_of

_TOLD, FEW_TOLD = 24, 3
"""Passes of a branch by which it is judged whether the past tells the next one, and how few do not judge it."""
_KNOWN = 0.7
"""How many of the passes must have been foretold by those before."""


def ways_before(fork: Fork, steps: Sequence[Step], parted_at: Collection[int]) -> list[Step]:
    """The way that all ranks went each time that they passed the branch before, and did not part there."""
    here = last_pass(steps[: fork.starts[0]], fork.branch)
    num_calls = len(_in_frame(steps[here + 1 : fork.starts[0]], fork.branch[0]))
    found: list[Step] = []
    passes = [index for index, step in enumerate(steps[:here]) if is_line(step) and place_of(step) == fork.branch]
    for index, following in pairwise([*passes, here]):
        if not any(index < start <= following for start in parted_at):
            own = _in_frame(steps[index + 1 : here], fork.branch[0])
            found += own[num_calls : num_calls + 1] or own[-1:]
    return found


def _in_frame(steps: Sequence[Step], code: int) -> list[Step]:
    """What a frame of `code` does in one line: the functions that it calls, and the next line of its own."""
    found: list[Step] = []
    depth = 0
    for step in steps:
        kind = kind_of(step)
        is_own = depth == 0 or (kind is Kind.LINE and place_of(step)[0] == code)  # an exception has left the others
        if is_own:
            found.append(step)
        if is_own and kind in (Kind.LINE, Kind.RETURN):
            break
        depth += {Kind.START: 1, Kind.RETURN: -1}.get(kind, 0)
    return found


def way_due(history: Sequence[Step], taken: Collection[Step | None]) -> Step | None:
    """What comes next by the common past; None where the past does not tell it, as of a coin that is tossed.

    Nor where some rank has `taken` another way that all ranks went before, and that the past did not tell then.
    """
    known = history[-_TOLD:]
    due = _followed(known)
    told = [(known[end], _followed(known[:end]) == known[end]) for end in range(1, len(known))]
    others = [is_told for step, is_told in told if step in taken and step != due][1:]  # the first one comes unforeseen
    is_told = len(told) >= FEW_TOLD and sum(is_told for _, is_told in told) >= _KNOWN * len(told)
    return due if is_told and sum(others) >= _KNOWN * len(others) else None


def _followed(history: Sequence[Step]) -> Step | None:
    """What mostly followed the longest run of past steps that is equal to the last ones; None without a past."""
    contexts = contexts_before(history)
    longest = max(contexts, default=0)
    followed = Counter(step for step, context in zip(history, contexts, strict=True) if context == longest)
    two = followed.most_common(2)
    is_clear = len(two) == 1 or (len(two) == 2 and two[0][1] > two[1][1])
    return two[0][0] if is_clear else None
