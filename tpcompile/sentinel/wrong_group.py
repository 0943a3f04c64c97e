"""Ranks that wait at one line in two groups with the same members -> the rank that used the wrong group: pure.

Groups with equal members are different groups: each has its own numbers and communicator, so ranks that use different
ones wait for each other at the same line. Ranks that use two groups in opposite order wait at different lines.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from tpcompile.evidence.groups.by_rank import ByRank, itself
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.base import at_text
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks, ranks_text
from tpcompile.evidence.timeline.stream import Place, place_of
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.situation import Situation


class _Wait(NamedTuple):
    """A rank that waits in a collective, issued or about to be."""

    state: RankState
    group: str
    place: Place
    line: UserLine | None

    @property
    def members(self) -> tuple[int, ...] | str:
        """The ranks of its group; for an unknown group its name, which equals no other group."""
        return self.state.members.get(self.group, self.group)

    @property
    def deviates(self) -> bool:
        """True for a rank that used a different group in all earlier collectives of that line."""
        used = {one.group for one in self.state.issued if one.is_done and one.place == self.place}
        return bool(used) and self.group not in used


def wrong_group(situation: Situation) -> Finding | None:
    """The finding where two ranks wait at one line in different groups with the same members."""
    waits = situation.now.found(lambda state: _wait(state, situation))
    pairs = combinations(waits.values(), 2)
    one = first(
        ours
        for ours, theirs in pairs
        if ours.group != theirs.group and (ours.place, ours.members) == (theirs.place, theirs.members)
    )
    return _describe(waits, one.place) if one is not None else None


def unlike_members(situation: Situation) -> Finding | None:
    """The finding where a rank is stuck in a group that has other members on a different rank.

    torch numbers groups by the calls of `new_group`, so a rank that left one out knows the next one by its number.
    """
    for rank, issued in situation.stuck.items():
        views = ByRank(
            {one: state.members[issued.group] for one, state in situation.now.items() if issued.group in state.members}
        )
        own = views.get(rank, ())
        apart = [members for members in views.values() if members != own and not set(own).isdisjoint(members)]
        if apart:
            says = "; ".join(
                f"on {named_ranks(ranks)} it has {ranks_text(views[ranks[0]])}" for ranks in views.groups(itself)
            )
            observed = f"group {issued.group!r} has different members: {says}"
            return Finding(Cause.GROUP, observed, views.unlike_majority(itself) or views.ranks, issued.line)
    return None


def _wait(state: RankState, situation: Situation) -> _Wait | None:
    issued = situation.stuck.get(state.rank)
    if issued is not None:
        return _Wait(state, issued.group, issued.place, issued.line)
    if state.rank in situation.calling:
        return _Wait(state, state.calling, place_of(state.stack), state.line)
    return None


def _describe(waits: ByRank[_Wait], place: Place) -> Finding:
    here = waits.where(lambda wait: wait.place == place)
    odd = here.some(lambda wait: wait.deviates) or here.unlike_majority(lambda wait: wait.group) or here.ranks
    one = here[odd[0]]
    says = "; ".join(f"rank {rank} waits in group {wait.group!r}" for rank, wait in here.items())
    members = ranks_text(one.state.members.get(one.group, ()))
    observed = f"the ranks use different process groups with the same members {members}{at_text(one.line)}: {says}"
    return Finding(Cause.GROUP, observed, odd, one.line)
