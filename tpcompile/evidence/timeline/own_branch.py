"""What one rank executed -> the branch at which it went another way than it did itself before, and both ways."""

from __future__ import annotations

from collections.abc import Mapping

from tpcompile.evidence.iterables import first
from tpcompile.evidence.records.base import UserLine
from tpcompile.evidence.records.findings import Parted
from tpcompile.evidence.timeline.flow import Flow
from tpcompile.evidence.timeline.own_way import OwnFork, own_detour, own_fork, own_pass
from tpcompile.evidence.timeline.part import side_of, user_line
from tpcompile.evidence.timeline.walk import Walks, common_start, forks, is_line, place_of


def left_own_way(flow: Flow, rank: int, left_out: UserLine, *, may_return: bool = False) -> Parted | None:
    """The branch at which a rank went another way than it did before, past a line that it executed then.

    A rank that `may_return` is back in lines that it executed before. None where it did as before, or that is not
    known. Raises ValueError for a flow that cannot be read.
    """
    walks = Walks.of({rank: flow}).without_numbers()
    found = own_fork(walks, rank, left_out, may_return=may_return)
    return _left_own_way(walks, rank, found) if found is not None else None


def left_own_pass(flow: Flow, rank: int, left_out: UserLine) -> Parted | None:
    """The branch at which a rank, between two times at a line, went a way that it had never gone there.

    Raises ValueError for a flow that cannot be read.
    """
    walks = Walks.of({rank: flow}).without_numbers()
    found = own_pass(walks, rank, left_out)
    return _left_own_way(walks, rank, found) if found is not None else None


def _left_own_way(walks: Walks, rank: int, found: OwnFork) -> Parted:
    fork = found.fork
    usual, now = (
        side_of(walks, [rank], first(way[start : end + 1]), way[start:end], fork)  # without a way goes on behind it
        for way, start, end in zip((found.usual, found.now), fork.starts, fork.ends, strict=True)
    )
    steps = walks.steps[rank]
    num_passes = sum(is_line(step) and place_of(step) == fork.branch for step in steps)
    line = user_line(walks, *fork.branch)
    return Parted(line=line, times=max(0, num_passes - 1), sides=(now,), usual=usual, odd=(rank,))


def left_own_part(flows: Mapping[int, Flow], rank: int) -> Parted | None:
    """Of a rank with a part of its own, as to evaluate: the branch at which it did that another way than before.

    Raises ValueError for a flow that cannot be read.
    """
    other = first(one for one in sorted(flows) if one != rank and flows[one].packed)
    if other is None or not flows[rank].packed:
        return None
    numbered = Walks.of({rank: flows[rank], other: flows[other]})
    begin = common_start(numbered.steps[rank], numbered.steps[other], are_whole=flows[rank].num_before == 0)
    walks = numbered.without_numbers()
    apart = forks(walks.steps[rank], walks.steps[other], begin) if begin is not None else ()
    found = own_detour(walks.steps[rank], list(apart))
    return _left_own_way(walks, rank, found) if found is not None else None
