"""A compile in a region without collectives: no rank waits in it, so that its result decides when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from tpcompile.sentinel.asking import Limits
from tpcompile.sentinel.counter_samples import COLLECTIVES
from tpcompile.sentinel.events import CompileEnded, CompileStarted, Later, PeerPassed, RaiseOneRank, Wait
from tpcompile.sentinel.messages import Announcement, CompilePost, Position, RankState
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.protocol import Protocol

PEER = RankState(rank=1, activity="running", since_s=0.0)


class Watched:
    """Rank 0 and a region `f`, whose first compile has ended."""

    def __init__(self, *, num_collectives: int) -> None:
        self.progress = Progress(lambda _: None, counters=lambda: {f"{COLLECTIVES}tp": 7})
        self.progress.is_active = True
        self.protocol = Protocol(0, range(2), self.progress, Limits())
        self.ends(self.starts()[0], num_collectives)

    def starts(self) -> tuple[Position, list[Any]]:
        """Begin a compile in the next call."""
        region = self.progress.enter(self.progress.region("f"))
        position = self.progress.compile_starts(f"0/{region.call}")
        number = 7 if region.is_local else 0
        found = Announcement(rank=0, position=position, compile_id="0/1", num_issued=number)
        return position, list(self.protocol.on(CompileStarted(found)))

    def ends(self, position: Position, num_collectives: int) -> list[Any]:
        """End it."""
        post = CompilePost(
            rank=0,
            frame="f",
            program="p",
            collectives=str(num_collectives),
            lowered="",
            num_collectives=num_collectives,
        )
        return list(self.protocol.on(CompileEnded(position, post, True)))

    def is_passed_at(self, position: Position) -> list[Any]:
        """Rank 1 says that it passed the position without compiling."""
        return list(self.protocol.on(PeerPassed(position, PEER)))


@pytest.mark.parametrize("num_collectives", [0, 1])
def test_a_peer_that_passed_is_reported_when_the_compile_has_ended_or_before_where_ranks_wait_in_it(
    num_collectives: int,
) -> None:
    watched = Watched(num_collectives=num_collectives)
    position, _ = watched.starts()
    early = [type(action) for action in watched.is_passed_at(position)]
    assert early == ([Later] if num_collectives else [])
    ended = [type(action) for action in watched.ends(position, num_collectives)]
    assert RaiseOneRank in ended and (Wait in ended) == bool(num_collectives)


def test_code_that_turns_out_to_communicate_is_announced_by_its_call_from_then_on() -> None:
    watched = Watched(num_collectives=0)
    position, (announced,) = watched.starts()
    assert announced.found.num_issued == 7
    watched.ends(position, 2)
    _, (announced,) = watched.starts()
    assert announced.found.num_issued == 0, "the region is no longer local"
