"""Logs of all ranks -> which ranks must agree: by the process groups that they name, or by the mesh.

Ranks that name a common group in compiled code issue collectives in it, so they must agree. Pipeline stages and
data-parallel replicas have no common group in compiled code, and may compile different programs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tpcompile.errors import ConfigError
from tpcompile.evidence.records.bounds import MAX_RANKS
from tpcompile.evidence.shortened import shortened
from tpcompile.evidence.text.ranks import exact_ranks

DEFAULT_GROUP = "0"
"""Torch numbers its groups; the default group is the first, and every rank is in it."""
_MAX_AXES = 16
"""A longer mesh is a mistake."""


class Source(Enum):
    """What says which ranks must agree."""

    MESH = "the mesh on the command line"
    GROUPS = "process groups named in compiled code"
    NOTHING = "no compiled code names a process group"


@dataclass(frozen=True)
class Domain:
    """Ranks that must agree."""

    name: str
    ranks: tuple[int, ...]
    places: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Rank -> its place along each axis of the mesh, where there is one."""

    @functools.cached_property
    def coordinates(self) -> dict[int, int]:
        """Rank -> its place in the domain."""
        return {rank: place for place, rank in enumerate(self.ranks)}


@dataclass(frozen=True)
class Domains:
    """Every rank in exactly one domain."""

    source: Source
    domains: tuple[Domain, ...]


@dataclass(frozen=True)
class Mesh:
    """A device mesh in row-major order, and the axis whose ranks run the same program."""

    sizes: Mapping[str, int]
    """Axis -> size."""
    axis: str

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return math.prod(self.sizes.values())

    def domains(self) -> Domains:
        """One domain per place on the other axes."""
        parts: dict[str, dict[int, dict[str, int]]] = {}
        for rank, numbers in enumerate(itertools.product(*map(range, self.sizes.values()))):
            place = dict(zip(self.sizes, numbers, strict=True))
            name = ", ".join(f"{axis}={number}" for axis, number in place.items() if axis != self.axis)
            parts.setdefault(name or "all", {})[rank] = place
        return Domains(Source.MESH, tuple(Domain(name, tuple(places), places) for name, places in parts.items()))


def parse_mesh(text: str, axis: str) -> Mesh:
    """`dp=2,tp=4` and `tp` -> mesh. Raises ConfigError."""
    shown = shortened(text, at_most=100)
    parts = text.split(",")
    if len(parts) > _MAX_AXES:
        raise ConfigError(f"--mesh {shown}: it has {len(parts)} axes, at most {_MAX_AXES} are read")
    axes = [_parse_axis(part.strip(), shown) for part in parts]
    sizes = dict(axes)
    if len(sizes) < len(axes):
        raise ConfigError(f"--mesh {shown}: an axis is named twice")
    num_ranks = math.prod(sizes.values())
    if num_ranks > MAX_RANKS:
        raise ConfigError(f"--mesh {shown}: it has {num_ranks:,} ranks; a job has at most {MAX_RANKS:,}")
    if axis not in sizes:
        given = axis or "(none)"
        choices = ", ".join(sizes)
        raise ConfigError(f"--axis {given}: choose from {choices}, whose ranks must agree")
    return Mesh(sizes, axis)


def _parse_axis(part: str, mesh: str) -> tuple[str, int]:
    name, _, number = part.partition("=")
    digits = number.lstrip("0")
    if not name or not (digits.isascii() and digits.isdigit()):
        raise ConfigError(f"--mesh {mesh}: write it as dp=2,tp=4, outermost axis first")
    if len(digits) > len(str(MAX_RANKS)):
        raise ConfigError(f"--mesh {mesh}: an axis has {len(digits)} digits; a job has at most {MAX_RANKS:,} ranks")
    return name, int(digits)


def by_groups(groups: Mapping[int, Sequence[str]], *, missing: Sequence[int] = ()) -> Domains:
    """Names of the groups in each rank's compiled code -> domains: ranks that share a name, directly or through others.

    `missing` are ranks without a log: a rank that seems alone in its group may have a peer among them. Ranks that name
    no group, or one that no other rank names, form one domain, or join the only domain of connected ranks.
    """
    if not any(groups.values()):
        return Domains(Source.NOTHING, (Domain("all", tuple(sorted(groups))),))
    shared: list[tuple[int, ...]] = []
    alone: list[tuple[int, ...]] = []
    silent: list[tuple[int, ...]] = []
    for part in _connected(groups):
        if len(part) > 1:
            shared.append(part)
        elif groups[part[0]]:
            alone.append(part)
        else:
            silent.append(part)
    apart: list[tuple[int, ...]] = []
    if len(alone) <= len(missing):
        apart, alone = alone, []
    lonely = tuple(itertools.chain.from_iterable(alone + silent))
    is_one_program = len(shared) == 1 and (not alone or len(lonely) == 1)
    if is_one_program:
        shared = [shared[0] + lonely]
    elif lonely:
        shared.append(lonely)
    return Domains(Source.GROUPS, _named(shared + apart))


def _named(parts: Sequence[tuple[int, ...]]) -> tuple[Domain, ...]:
    """Domains in the order of their ranks; a single one is called `all`."""
    if len(parts) == 1:
        return (Domain("all", tuple(sorted(parts[0]))),)
    in_order = sorted(tuple(sorted(part)) for part in parts)
    return tuple(Domain(f"ranks {exact_ranks(part)}", part) for part in in_order)


def _connected(groups: Mapping[int, Sequence[str]]) -> list[tuple[int, ...]]:
    """Ranks that share a group, directly or through other ranks."""
    users: dict[str, list[int]] = {}
    for rank, names in groups.items():
        for name in names:
            users.setdefault(name, []).append(rank)
    if DEFAULT_GROUP in users:
        users[DEFAULT_GROUP] = list(groups)
    part_of: dict[int, list[int]] = {rank: [rank] for rank in groups}
    for ranks in users.values():
        for rank in ranks[1:]:
            _join(part_of, ranks[0], rank)
    by_first = {id(part): tuple(part) for part in part_of.values()}
    return list(by_first.values())


def _join(part_of: dict[int, list[int]], one: int, other: int) -> None:
    """Make the parts of two ranks one. The smaller part is moved: its ranks are then in one at least twice as large, so
    that no rank is moved more than log2(number of ranks) times."""
    small, large = sorted([part_of[one], part_of[other]], key=len)
    if small is large:
        return
    large += small
    part_of.update(dict.fromkeys(small, large))


def roles_of(groups: Mapping[int, Sequence[str]]) -> dict[int, dict[str, str]]:
    """Rank of one domain -> name of a group -> its role, which is the same on all ranks.

    A name that two ranks share is one group. Groups with different names (the tensor-parallel group of each replica)
    have the same role where they appear in the same place.
    """
    shared: dict[str, str] = {}
    for rank in sorted(groups):
        taken = {shared[name] for name in groups[rank] if name in shared}
        numbers = itertools.count()
        for name in groups[rank]:
            while name not in shared:
                role = f"group#{next(numbers)}"
                if role not in taken:
                    shared[name] = role
    return {rank: {name: shared[name] for name in groups[rank]} for rank in sorted(groups)}
