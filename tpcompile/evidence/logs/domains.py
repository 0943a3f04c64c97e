"""Logs of all ranks -> which ranks must agree: by the process groups they name, or as the mesh says.

Ranks that name a common group in compiled code depend on each other: they issue collectives in it. Pipeline stages
and data-parallel replicas name none in common, and may compile what they like.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tpcompile.errors import ConfigError
from tpcompile.evidence.text.ranks import ranks_text

DEFAULT_GROUP = "0"
"""Torch counts its groups; the default one is the first, and every rank is in it."""


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


@dataclass(frozen=True)
class Domains:
    """Every rank in exactly one domain."""

    source: Source
    domains: tuple[Domain, ...]

    def of(self, rank: int) -> Domain:
        """The domain of a rank."""
        return next(domain for domain in self.domains if rank in domain.ranks)


@dataclass(frozen=True)
class Mesh:
    """A device mesh in row-major order, and the axis whose ranks run the same program."""

    sizes: tuple[tuple[str, int], ...]
    axis: str

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return math.prod(size for _, size in self.sizes)

    def domains(self) -> Domains:
        """One domain per place on the other axes."""
        names = [name for name, _ in self.sizes]
        places = itertools.product(*(range(size) for _, size in self.sizes))
        members: dict[str, list[int]] = {}
        for rank, place in enumerate(places):
            at = dict(zip(names, place, strict=True))
            del at[self.axis]
            others = ", ".join(f"{name}={number}" for name, number in at.items())
            members.setdefault(others or "all", []).append(rank)
        found = tuple(Domain(name, tuple(ranks)) for name, ranks in members.items())
        return Domains(Source.MESH, found)


def parse_mesh(text: str, axis: str) -> Mesh:
    """`dp=2,tp=4` and `tp` -> mesh. Raises ConfigError."""
    sizes = []
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name or not size.isdecimal() or int(size) < 1:
            raise ConfigError(f"--mesh {text}: write it as dp=2,tp=4, outermost axis first")
        sizes.append((name, int(size)))
    names = [name for name, _ in sizes]
    if len(set(names)) < len(names):
        raise ConfigError(f"--mesh {text}: an axis is named twice")
    if axis not in names:
        raise ConfigError(f"--axis {axis or '(none)'}: choose from {', '.join(names)}, whose ranks must agree")
    return Mesh(tuple(sizes), axis)


def by_groups(groups: Mapping[int, Sequence[str]], *, missing: Sequence[int] = ()) -> Domains:
    """Rank -> names of the groups in its compiled code, to domains: ranks that share a name, directly or not.

    `missing` are ranks without a log: one that would be alone in its group may have a peer among them.
    """
    if not any(groups.values()):
        return Domains(Source.NOTHING, (Domain("all", tuple(sorted(groups))),))
    parts = _connected(groups)
    without_peers = [part for part in parts if len(part) == 1 and groups[part[0]]]
    if len(without_peers) > len(missing):
        without_peers = []
    others = [part for part in parts if part not in without_peers]
    parts = sorted([*_with_lonely(others, groups), *without_peers])
    if len(parts) == 1:
        return Domains(Source.GROUPS, (Domain("all", parts[0]),))
    return Domains(Source.GROUPS, tuple(Domain(f"ranks {ranks_text(part)}", part) for part in parts))


def _with_lonely(parts: Sequence[tuple[int, ...]], groups: Mapping[int, Sequence[str]]) -> list[tuple[int, ...]]:
    """Who names no group, or one of its own, is with its like if one of them issues collectives, else with the rest."""
    shared = [part for part in parts if len(part) > 1]
    lonely = tuple(part[0] for part in parts if len(part) == 1)
    if not lonely:
        return shared
    is_silent = not any(groups[rank] for rank in lonely)
    if len(shared) == 1 and (is_silent or len(lonely) == 1):
        return [tuple(sorted(shared[0] + lonely))]
    return [*shared, tuple(sorted(lonely))]


def _connected(groups: Mapping[int, Sequence[str]]) -> list[tuple[int, ...]]:
    """Ranks that share a group, directly or through others."""
    part_of = {rank: {rank} for rank in groups}
    for ranks in _users(groups):
        merged = set[int]().union(*(part_of[rank] for rank in ranks))
        part_of |= dict.fromkeys(merged, merged)
    return list(dict.fromkeys(tuple(sorted(part)) for part in part_of.values()))


def _users(groups: Mapping[int, Sequence[str]]) -> list[list[int]]:
    """Ranks of every group; all of them are in the default one."""
    users: dict[str, list[int]] = {}
    for rank, names in groups.items():
        for name in names:
            users.setdefault(name, []).append(rank)
    if DEFAULT_GROUP in users:
        users[DEFAULT_GROUP] = list(groups)
    return list(users.values())


def roles_of(groups: Mapping[int, Sequence[str]], ranks: Sequence[int]) -> dict[int, dict[str, str]]:
    """By rank of one domain: name of a group -> what stands for it on all ranks.

    A name that two ranks share is one group. Groups that differ in name (the tensor-parallel group of each replica)
    stand for each other in order of appearance.
    """
    shared: dict[str, str] = {}
    found: dict[int, dict[str, str]] = {}
    for rank in sorted(ranks):
        mine = {name: shared[name] for name in groups[rank] if name in shared}
        for name in groups[rank]:
            if name not in mine:
                mine[name] = shared[name] = _free_role(shared, mine)
        found[rank] = mine
    return found


def _free_role(shared: Mapping[str, str], mine: Mapping[str, str]) -> str:
    """The first role that a rank has no group for yet, or a new one."""
    roles = list(dict.fromkeys(shared.values()))
    free = [role for role in roles if role not in mine.values()]
    return free[0] if free else f"group#{len(roles)}"
