"""Ranks that wait at one line, in two groups of the same ranks -> which of them took the other group: pure.

Equal members do not make one group: each has numbers and a communicator of its own, so ranks that were given different
ones wait for each other at the same line. Ranks that enter two groups in opposite order wait at different lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.waits import calling_since, stuck_since

_Place = tuple[tuple[str, int], ...]


class _Wait(NamedTuple):
    """A rank that waits in a collective, issued or about to be."""

    group: str
    place: _Place
    line: UserLine | None


def other_group(states: Mapping[int, RankState], before: Mapping[int, RankState]) -> Finding | None:
    """Two ranks wait at one line in different groups whose ranks are the same."""
    waits = {rank: wait for rank, state in sorted(states.items()) if (wait := _wait(state, before)) is not None}
    for first, second in combinations(waits, 2):
        ours, theirs = waits[first], waits[second]
        is_other = ours.group != theirs.group and ours.place == theirs.place
        if is_other and _members(states[first], ours.group) == _members(states[first], theirs.group):
            return _describe(states, waits, place=ours.place)
    return None


def _wait(state: RankState, before: Mapping[int, RankState]) -> _Wait | None:
    stuck = stuck_since(state, before)
    if stuck is not None:
        return _Wait(stuck.group, stuck.place, stuck.line)
    if not calling_since(state, before):
        return None
    place = tuple((frame.file, frame.line) for frame in state.stack)
    return _Wait(state.calling, place, state.line)


def _members(state: RankState, group: str) -> tuple[int, ...] | str:
    """Its ranks; a group that is not known is equal to none."""
    return state.members.get(group, group)


def _describe(states: Mapping[int, RankState], waits: Mapping[int, _Wait], *, place: _Place) -> Finding:
    here = {rank: wait for rank, wait in waits.items() if wait.place == place}
    odd = _left_their_habit(states, here) or _minority(here) or tuple(here)
    line = here[odd[0]].line
    says = "; ".join(f"rank {rank} waits in group {wait.group!r}" for rank, wait in here.items())
    members = ranks_text(_ranks(states, here[odd[0]].group))
    at = f" at {line}" if line else ""
    return Finding(Cause.GROUP, f"the ranks use different groups of the same ranks {members}{at}: {says}", odd, line)


def _ranks(states: Mapping[int, RankState], group: str) -> tuple[int, ...]:
    return next((state.members[group] for state in states.values() if group in state.members), ())


def _left_their_habit(states: Mapping[int, RankState], here: Mapping[int, _Wait]) -> tuple[int, ...]:
    """Ranks that used another group in all earlier collectives of that line."""
    odd = []
    for rank, wait in here.items():
        used = {one.group for one in states[rank].issued if one.place == wait.place and one.is_done}
        if used and wait.group not in used:
            odd.append(rank)
    return tuple(odd) if len(odd) < len(here) else ()


def _minority(here: Mapping[int, _Wait]) -> tuple[int, ...]:
    """Ranks beside those of a strict majority."""
    groups = [wait.group for wait in here.values()]
    usual = max(groups, key=groups.count)
    if 2 * groups.count(usual) <= len(groups):
        return ()
    return tuple(rank for rank, wait in here.items() if wait.group != usual)
