"""State of a rank, a region -> the lines at which it is inside that region's function, compiled or not: pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tpcompile.evidence.iterables import first, last
from tpcompile.evidence.records import UserLine
from tpcompile.sentinel.messages import RankState


def runs(state: RankState, region: str) -> bool:
    """True when the rank is inside the function of that region, compiled or not."""
    return bool(_inside(state, region))


def line_in(state: RankState, region: str) -> UserLine | None:
    """The line of that region's function at which the rank is; None when it is not inside it."""
    return first(_inside(state, region))


def called_at(state: RankState, region: str) -> UserLine | None:
    """The line that called that region's function; if unknown, the line inside the function."""
    return last(_inside(state, region))


def frames_inside(stack: tuple[UserLine, ...], region: str, regions: Iterable[str]) -> tuple[UserLine, ...]:
    """The frame of that region's function in a stack (innermost first), and its caller's; empty when not in it."""
    wanted = _code_of(region)
    for number, frame in enumerate(stack):
        is_of_name = frame.function == wanted.function and frame.file.endswith(wanted.file)
        if is_of_name and _is_nearest(frame.line, wanted, regions):
            return stack[number : number + 2]
    return ()


def _inside(state: RankState, region: str) -> tuple[UserLine, ...]:
    """The frame of that region's function and, where it is known, the one that called it."""
    blocked_in = state.blocked_in
    # The user's frames of the main thread, and those of the collective it is blocked in; innermost first.
    stacks = [state.stack[::-1], blocked_in.stack if blocked_in else ()]
    found = (frames_inside(stack, region, state.calls) for stack in stacks)
    return next(filter(None, found), ())


class _Code(NamedTuple):
    """Name, file and first line of a region's function."""

    function: str
    file: str
    first_line: int


def _code_of(region: str) -> _Code:
    """Parse a region's name; a name given by the user has no file and line."""
    name, _, place = region.rpartition(" ")
    file, _, first_line = place.rpartition(":")
    return _Code(name.rpartition(".")[2], file, int(first_line) if first_line.isdigit() else 0)


def _is_nearest(line: int, wanted: _Code, regions: Iterable[str]) -> bool:
    """True when no other known function of that name in that file begins between its first line and `line`."""
    known = [wanted, *map(_code_of, regions)]
    begins = [code.first_line for code in known if code[:2] == wanted[:2] and code.first_line <= line]
    return wanted.first_line == max(begins, default=None)
