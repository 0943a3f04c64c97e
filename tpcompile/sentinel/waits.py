"""State of a rank -> is it stuck, in what, and for which ranks it waits: pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tpcompile.evidence.records import UserLine
from tpcompile.sentinel.messages import Issued, RankState
from tpcompile.sentinel.progress import COMPILES


def waits(state: RankState) -> bool:
    """True for a rank that waits for others itself."""
    return state.blocked or state.waits_at is not None or state.p2p is not None or stuck_in(state) is not None


def waits_for(states: Mapping[int, RankState], before: Mapping[int, RankState]) -> Iterator[tuple[int, int, str]]:
    """(rank, rank it waits for, in what): only waits that cannot end unless the other rank moves."""
    for rank, state in sorted(states.items()):
        if state.waits_at is not None:
            for other, theirs in sorted(states.items()):
                if other != rank and theirs.waits_at != state.waits_at:
                    yield rank, other, f"for it at {state.waits_at}"
            continue
        then = before.get(rank)
        if state.p2p is not None and state.p2p.peer in states and then is not None and then.p2p == state.p2p:
            yield rank, state.p2p.peer, f"in {state.p2p}"
            continue
        stuck = stuck_since(state, before)
        if stuck is None and calling_since(state, before):
            for other, theirs in sorted(states.items()):
                is_member = state.calling in theirs.groups and not _is_ahead(theirs, state, state.calling)
                if other != rank and theirs.waits_at is not None and is_member:
                    yield rank, other, f"to begin a collective of group {state.calling!r}{_at(state.line)}"
        if stuck is None:
            continue
        for other, theirs in sorted(states.items()):
            last = max((i.seq for i in theirs.issued if i.group == stuck.group), default=0)
            if other != rank and stuck.group in theirs.groups and last < stuck.seq:
                yield rank, other, f"in {stuck}"


def _is_ahead(theirs: RankState, state: RankState, group: str) -> bool:
    """True when the other rank has issued what this one is about to."""
    last = [max((i.seq for i in s.issued if i.group == group), default=0) for s in (theirs, state)]
    return last[0] > last[1]


def calling_since(state: RankState, before: Mapping[int, RankState]) -> bool:
    """True when the rank has been in one call of a collective since the round before, without issuing it."""
    then = before.get(state.rank)
    if then is None or not state.calling:
        return False
    return (state.calling, state.stack) == (then.calling, then.stack) and len(state.issued) == len(then.issued)


def _at(line: UserLine | None) -> str:
    return f" at {line}" if line else ""


def stuck_in(state: RankState) -> Issued | None:
    """The oldest collective this rank is blocked in."""
    return max(state.in_flight, key=lambda issued: issued.age_s, default=None)


def last_issued(state: RankState) -> Issued | None:
    """The newest collective of this rank."""
    return min(reversed(state.issued), key=lambda issued: issued.age_s, default=None)  # they are sorted by group


def stuck_since(state: RankState, before: Mapping[int, RankState]) -> Issued | None:
    """The same, when neither it nor the program has moved since the round before.

    A rank that compiles is stuck only in what it issued since it began to: a collective of the compiler.
    """
    now, then = stuck_in(state), before.get(state.rank)
    if now is None or then is None or state.stack != then.stack:
        return None
    if compiles(state) and now.age_s > state.since_s:
        return None
    old = stuck_in(then)
    return now if old is not None and (old.group, old.seq) == (now.group, now.seq) else None


def stuck_line(state: RankState) -> UserLine | None:
    """Where the collective was called; on a GPU the program is elsewhere by now."""
    stuck = stuck_in(state)
    return (stuck.line if stuck and state.waits_at is None else None) or state.line


def compiles(state: RankState) -> bool:
    return state.activity in COMPILES or state.in_dynamo


def runs(state: RankState, region: str) -> bool:
    """True when the rank is inside the function of that region, compiled or not."""
    return _inside(state, region) is not None


def line_in(state: RankState, region: str) -> UserLine | None:
    """The line of that region's function at which the rank is; None when it is not inside of it."""
    inside = _inside(state, region)
    return inside[0] if inside else None


def called_at(state: RankState, region: str) -> UserLine | None:
    """The user's line from which the rank called that region's function, or where it is inside when none is known."""
    inside = _inside(state, region)
    return inside[-1] if inside else None


def _inside(state: RankState, region: str) -> tuple[UserLine, ...] | None:
    """The frame of that region's function and, where it is known, the one that called it."""
    wanted = _code_of(region)
    for stack in _stacks(state):
        for number, frame in enumerate(stack):
            is_there = frame.function == wanted.function and frame.file.endswith(wanted.file)
            if is_there and _is_nearest(frame.line, wanted, state):
                return stack[number : number + 2]
    return None


def _stacks(state: RankState) -> list[tuple[UserLine, ...]]:
    """The user's frames of the main thread, and those of the collective it is stuck in; innermost first."""
    stuck = stuck_in(state)
    of_collective = stuck.stack or ((stuck.line,) if stuck.line else ()) if stuck else ()
    return [state.stack[::-1], of_collective]


class _Code(NamedTuple):
    """Where a region's function begins."""

    function: str
    file: str
    first_line: int


def _code_of(region: str) -> _Code:
    """Of a region that the user named, the name is all there is."""
    name, _, place = region.rpartition(" ")
    file, _, first_line = place.rpartition(":")
    return _Code(name.rpartition(".")[2], file, int(first_line) if first_line.isdigit() else 0)


def _is_nearest(line: int, wanted: _Code, state: RankState) -> bool:
    """True when no other known function of that name in that file begins between its first line and `line`."""
    known = [wanted, *(_code_of(region) for region in state.calls)]
    namesakes = [code for code in known if (code.function, code.file) == (wanted.function, wanted.file)]
    nearest = max((code.first_line for code in namesakes if code.first_line <= line), default=None)
    return nearest == wanted.first_line
