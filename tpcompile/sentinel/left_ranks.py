"""Ranks that have left, whose states are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from tpcompile.sentinel.messages import RankState


class LeftRanks(Mapping[int, RankState]):
    """Ranks that have left, with their states: of 1,000 ranks that end a job no state is read."""

    def __init__(self, ranks: Iterable[int], state_of: Callable[[int], RankState]) -> None:
        self._known: dict[int, RankState | None] = dict.fromkeys(ranks)
        self._state_of = state_of

    def __getitem__(self, rank: int) -> RankState:
        state = self._known[rank]
        if state is None:
            state = self._known[rank] = self._state_of(rank)
        return state

    def __contains__(self, rank: object) -> bool:
        return rank in self._known

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
