"""The command line -> the job that is played: its mesh, and which of its ranks are traced."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tpcompile.errors import ConfigError

_NUM_DRAWN = 8
"""Ranks that are drawn and traced although they start as others do: an eighth of all, and no more than these."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job, and the ranks of it that are traced."""

    target: str
    settings: tuple[str, ...] = ()
    axes: tuple[tuple[str, int], ...]
    """Name and size of each axis of the mesh, outermost first."""
    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    seed: int = 0
    """What ranks are drawn with."""
    lowers_all: bool = False
    """AOTAutograd runs on every rank, not only on those of the first group."""
    arch: str = ""
    """The GPU that code is generated for, `sm_90`; none where tensors are on meta."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return math.prod(size for _, size in self.axes)

    @property
    def axis(self) -> str:
        """The axis whose groups must agree, where the target names none: `tp`, or the innermost."""
        names = [name for name, _ in self.axes]
        return "tp" if "tp" in names else names[-1]

    @property
    def group_size(self) -> int:
        """Ranks of a group of the innermost axis."""
        return self.axes[-1][1]

    def lowers(self, rank: int) -> bool:
        """True for the ranks of the first group of the innermost axis.

        What AOTAutograd makes of a Dynamo graph follows from the graph and the coordinate: ranks of the other groups
        whose graphs are equal would get what the rank with their coordinate got.
        """
        return self.lowers_all or rank < self.group_size

    def when_alike(self) -> tuple[int, ...]:
        """The ranks that are traced where none was seen to learn its rank: the first and the last group.

        Shards of uneven size differ by the coordinate: each coordinate of the innermost axis is among them. Two
        neighbours of a group in the middle are drawn: what was not seen may differ by more than one rank.
        """
        if self.is_sample:
            return self.ranks
        size = self.group_size
        outer = [rank for rank in self.ranks if rank < size or rank >= self.world_size - size]
        return tuple(sorted([*outer, *self._between]))

    @cached_property
    def _between(self) -> list[int]:
        """Two neighbours of a group that is neither the first nor the last."""
        size = self.group_size
        groups = range(1, self.world_size // size - 1)
        if not groups or size < 2:
            return []
        draw = random.Random(self.seed)
        first = draw.choice(groups) * size + draw.randrange(size - 1)
        return [first, first + 1]

    def is_certain(self, rank: int) -> bool:
        """True for the ranks that are traced in any case: the first and the last group, and some that are drawn."""
        is_outer = rank < self.group_size or rank >= self.world_size - self.group_size
        return is_outer or rank in self._drawn

    def may_save(self) -> bool:
        """True where ranks need not be traced if those that are can stand for them."""
        return not all(map(self.is_certain, self.ranks))

    @cached_property
    def _drawn(self) -> frozenset[int]:
        count = min(_NUM_DRAWN, len(self.ranks) // 8)
        return frozenset(random.Random(self.seed).sample(self.ranks, count))

    @property
    def is_sample(self) -> bool:
        """True where some ranks of the job are not traced."""
        return len(self.ranks) < self.world_size


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of a rank."""

    is_first: bool = False
    """It says for all what it imports, and that there is no GPU."""
    is_watched: bool = False
    """Its build and calls are watched for reads of the rank, which costs three to six times as much."""
    starts: Mapping[str, int] | None = None
    """Start of the calls -> the rank that was traced from it; None where the start does not matter."""
    is_traced: bool = False
    """It is traced even where its start is known."""
    users_modules: tuple[str, ...] = ()
    """Names of the modules that it has to import itself."""
    ring: str = ""
    """Name of the ring into which it records the lines that it executes, where that is asked for."""
    groups: frozenset[str] = frozenset()
    """Hashes of the process groups that ranks before it have made."""


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


def ranks_of(axes: Sequence[tuple[str, int]], *, count: int | None, seed: int) -> tuple[int, ...]:
    """All ranks, or `count` of them: whole groups of the innermost axis, the first, the last, and others drawn with the
    seed. Ranks are compared with those of their group: one that is drawn alone would be compared with nothing.

    A group that would have too many gives its first ranks and its last, where these are two or more. Raises ConfigError
    for a count of fewer than 2, which compares nothing.
    """
    world_size = math.prod(size for _, size in axes)
    if count is None or count >= world_size:
        return tuple(range(world_size))
    if count < 2:
        raise ConfigError(f"--ranks {count}: nothing is compared among fewer than 2 ranks")
    size = max(axes[-1][1], 2)
    groups = [range(at, min(at + size, world_size)) for at in range(0, world_size, size)]
    inner = random.Random(seed).sample(groups[1:-1], max(len(groups) - 2, 0))
    ranks: list[int] = []
    for group in (groups[0], groups[-1], *inner):
        num_left = count - len(ranks)
        if num_left >= len(group):
            ranks += group
        elif num_left > 1:
            ranks += (*group[: num_left - 1], group[-1])
    return tuple(sorted(ranks))
