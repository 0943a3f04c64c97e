"""Stack of a rank that aborted, collective of a remaining rank -> the line at which their programs part: pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import UserLine
from tpcompile.sentinel.messages import Issued, RankState, place_of
from tpcompile.sentinel.situation import Lost

Used = Collection[tuple[str, int]]
"""Lines from which the remaining rank issued collectives before."""


@dataclass(frozen=True)
class Parted:
    """The frames at which two stacks part."""

    own: UserLine
    """That of the dead rank."""
    other: UserLine
    """That of the remaining rank."""
    line: UserLine
    """The one to report where either rank may be right: only one rank came there, or it is first in the program."""
    is_own_new: bool
    """No other rank issues collectives from where the dead rank was."""
    is_of_calls: bool
    """Both ranks are in the same line of a compiled function, which they call from different lines."""


def parted_stacks(gone: Lost, issued: Issued, state: RankState) -> Parted | None:
    """Where the stacks part; None when one of them ends before that."""
    mine = list(gone.stack)
    theirs = list(reversed(issued.stack))
    depth = first(depth for depth, pair in enumerate(zip(mine, theirs, strict=False)) if _is_unlike(*pair))
    if depth is None:
        return None
    earlier = [one for one in state.issued if one.id != issued.id]
    used = {line for one in earlier for line in one.place}
    own, other = _new_frame(mine[depth:], used), _new_frame(theirs[depth:], used)
    is_of_calls = issued.call_line is not None and not _is_unlike(mine[-1], theirs[-1])
    is_own_known = _is_known(own, used)
    is_other_known = _is_known(other, used) or _came_round(issued, earlier)
    if is_own_known != is_other_known:
        line = other if is_own_known else own
    else:
        line = _first_in_program(own, other, _line_before(state, issued, depth))
    return Parted(mine[depth], theirs[depth], line, not is_own_known, is_of_calls)


def _is_unlike(one: UserLine, other: UserLine) -> bool:
    return place_of([one]) != place_of([other])


def _is_known(frame: UserLine, used: Used) -> bool:
    return place_of([frame])[0] in used


def _new_frame(frames: Sequence[UserLine], used: Used) -> UserLine:
    """The outermost frame in a line that was not used before; else the outermost frame."""
    return first(frame for frame in frames if not _is_known(frame, used)) or frames[0]


def _came_round(issued: Issued, earlier: Sequence[Issued]) -> bool:
    """True when an earlier call of compiled code was made from the same line."""
    lines = [one.call_line for one in earlier if one.call != issued.call]
    return issued.call_line is not None and issued.call_line in lines


def _line_before(state: RankState, issued: Issued, depth: int) -> int:
    """Line of the collective before, at the depth where the stacks part; 0 where it was in a different function."""
    before = first(one for one in state.issued_in(issued.group) if one.seq == issued.seq - 1)
    if before is None or before.place[:depth] != issued.place[:depth] or len(before.place) <= depth:
        return 0
    return before.place[depth][1]


def _first_in_program(own: UserLine, other: UserLine, before: int) -> UserLine:
    """The line that follows first on the line `before`; one that does not follow is of the next iteration."""
    if (own.file, own.function) != (other.file, other.function):
        return own
    return min(own, other, key=lambda frame: (frame.line <= before, frame.line < before, frame.line))
