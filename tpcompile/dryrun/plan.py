"""The command line -> the job that is played: its mesh, and which of its ranks are traced."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from tpcompile.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job, and the ranks of it that are traced."""

    target: str
    settings: tuple[str, ...] = ()
    axes: tuple[tuple[str, int], ...]
    """Name and size of each axis of the mesh, outermost first."""
    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    seed: int | None = None
    """What the ranks were drawn with; None where all are traced."""
    lowers_all: bool = False
    """AOTAutograd runs on every rank, not only on those of the first group."""
    arch: str = ""
    """The GPU that code is generated for, `sm_90`; none where tensors are on meta."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return math.prod(size for _, size in self.axes)

    def lowers(self, rank: int) -> bool:
        """True for the ranks of the first group of the innermost axis.

        What AOTAutograd makes of a Dynamo graph follows from the graph and the coordinate: ranks of the other groups
        whose graphs are equal would get what the rank with their coordinate got.
        """
        return self.lowers_all or rank < self.axes[-1][1]

    def when_alike(self) -> tuple[int, ...]:
        """The ranks that are traced where none was seen to learn its rank: the first and the last group.

        Shards of uneven size differ by the coordinate: each coordinate of the innermost axis is among them. Two
        neighbours of a group in the middle are drawn: what was not seen may differ by more than one rank.
        """
        if self.is_sample:
            return self.ranks
        size = self.axes[-1][1]
        outer = [rank for rank in self.ranks if rank < size or rank >= self.world_size - size]
        return tuple(sorted([*outer, *self._drawn_between(size)]))

    def _drawn_between(self, size: int) -> list[int]:
        """Two neighbours of a group that is neither the first nor the last."""
        groups = range(1, self.world_size // size - 1)
        if not groups or size < 2:
            return []
        draw = random.Random(self.seed)
        first = draw.choice(groups) * size + draw.randrange(size - 1)
        return [first, first + 1]

    @property
    def is_sample(self) -> bool:
        """True where some ranks of the job are not traced."""
        return len(self.ranks) < self.world_size


def axes_of(world_size: int | None, mesh: str | None) -> tuple[tuple[str, int], ...]:
    """Axes of the mesh: those of `dp=64,tp=16`, or all ranks on `tp`.

    Raises ConfigError for sizes that are no job of at least two ranks.
    """
    axes = (("tp", world_size or 0),) if mesh is None else tuple(map(_axis, mesh.split(",")))
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise ConfigError(f"--mesh {mesh}: an axis is named twice; name each once, outermost first")
    total = math.prod(size for _, size in axes)
    if world_size is not None and total != world_size:
        raise ConfigError(f"--mesh {mesh} has {total} ranks and --world-size is {world_size}; give one, or equal ones")
    if total < 2:
        raise ConfigError("nothing is compared among fewer than 2 ranks; give --world-size N or --mesh dp=N,tp=M")
    return axes


def _axis(text: str) -> tuple[str, int]:
    name, _, size = text.strip().partition("=")
    if not name or not size.isdecimal() or int(size) < 1:
        raise ConfigError(f"--mesh: {text!r} is no axis; write NAME=SIZE, such as dp=64,tp=16")
    return name, int(size)


def ranks_of(world_size: int, *, count: int | None, seed: int) -> tuple[int, ...]:
    """All ranks, or `count` of them: the first, the last, and others drawn with the seed.

    Raises ConfigError for a count of fewer than 2, which compares nothing.
    """
    if count is None or count >= world_size:
        return tuple(range(world_size))
    if count < 2:
        raise ConfigError(f"--ranks {count}: nothing is compared among fewer than 2 ranks")
    drawn = random.Random(seed).sample(range(1, world_size - 1), count - 2)
    return tuple(sorted([0, world_size - 1, *drawn]))
