"""Two events of a program -> whether it went back between them, and which comes first in the source: pure."""

from __future__ import annotations

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.timeline.expect import num_equal
from tpcompile.evidence.timeline.stream import Event


def function_of(frame: UserLine) -> tuple[str, str]:
    """File and function of a frame."""
    return frame.file, frame.function


def depth_of_loop(event: Event, before: Event) -> int | None:
    """The depth at which a program went back to an earlier line, or to the same one; None where it went on."""
    depth = min(num_equal(event.place, before.place), len(event.stack) - 1, len(before.stack) - 1)
    if depth < 0:
        return None
    mine, theirs = event.stack[depth], before.stack[depth]
    is_back = function_of(mine) == function_of(theirs) and mine.line <= theirs.line
    return depth if is_back else None


def is_below(event: Event, other: Event) -> bool:
    """True when the line at which two stacks part is below the other, in one function."""
    depth = num_equal(event.place, other.place)
    if depth >= min(len(event.stack), len(other.stack)):
        return False
    mine, theirs = event.stack[depth], other.stack[depth]
    return function_of(mine) == function_of(theirs) and mine.line > theirs.line
