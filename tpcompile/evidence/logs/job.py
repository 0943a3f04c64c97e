"""Logs of a job + its domains -> the compiles of each rank beside those of its peers in the same frames."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import differ
from tpcompile.evidence.logs.compiled import Frame, LoggedCompile
from tpcompile.evidence.logs.domains import Domain, Domains, roles_of
from tpcompile.evidence.logs.ranklog import RankLog


@dataclass(frozen=True)
class Member:
    """One rank that left a log."""

    log: RankLog
    domain: Domain
    roles: Mapping[str, str]
    """Name of a process group -> its role, the same on all ranks of the domain."""
    is_incomplete: bool
    """True when the log lacks something: a compile that is missing was not observed."""

    def role(self, group: str) -> str:
        """Role of a group, the same on all ranks of the domain."""
        return self.roles.get(group, group)

    def text_key(self, compile_: LoggedCompile) -> str:
        """Equal for compiles whose whole text is equal, roles of groups included."""
        return " ".join([compile_.sha, *map(self.role, compile_.groups)])

    def issued(self, compile_: LoggedCompile) -> list[tuple[str, str]]:
        """(op, role of the group) of the collectives in the graphs of a compile."""
        return [(op, self.role(group)) for op, group in compile_.issued]


@dataclass(frozen=True)
class Step:
    """The n-th compile of one frame on each rank that has one."""

    frame: Frame
    compiles: ByRank[LoggedCompile]


@dataclass(frozen=True)
class DomainLogs:
    """Ranks that must agree, as far as they left a log."""

    domain: Domain
    members: ByRank[Member]

    @property
    def is_whole(self) -> bool:
        """True when every rank left a log that lacks nothing."""
        whole = self.members.where(lambda member: not member.is_incomplete)
        return whole.ranks == self.domain.ranks

    @functools.cached_property
    def sizes(self) -> dict[Frame, int]:
        """Bytes of text of every compiled frame, in order of appearance."""
        sizes: Counter[Frame] = Counter()
        for member in self.members.values():
            sizes.update(member.log.sizes)
        return dict(sizes)

    def differing(self) -> list[Frame]:
        """Frames whose text is not equal on all ranks, in order of appearance."""
        members = self.members.values()
        found: list[Frame] = []
        for frame in self.sizes:
            texts = [tuple(map(member.text_key, member.log.by_frame.get(frame, []))) for member in members]
            if differ(texts):
                found.append(frame)
        return found

    def steps(self) -> Iterator[Step]:
        """The first, second, ... compiles of every frame, as far as all ranks that compiled the frame have one."""
        for frame in self.sizes:
            compiles: dict[int, list[LoggedCompile]] = {}
            for rank, member in self.members.items():
                if frame in member.log.by_frame:
                    compiles[rank] = member.log.by_frame[frame]
            if len(compiles) < 2:
                continue
            for turn in zip(*compiles.values(), strict=False):
                yield Step(frame, ByRank(dict(zip(compiles, turn, strict=True))))


class Job:
    """Logs of all ranks, and which of them must agree. The log of an `incomplete` rank lacks something."""

    def __init__(
        self, logs: ByRank[RankLog], domains: Domains, *, world_size: int, incomplete: frozenset[int] = frozenset()
    ) -> None:
        self.logs, self.source, self.world_size = logs, domains.source, world_size
        self._incomplete = incomplete
        self.domains = [self._logs_of(domain) for domain in domains.domains]
        """Every rank is in one of them."""

    @property
    def members(self) -> ByRank[Member]:
        """All ranks that left a log."""
        return ByRank({rank: member for part in self.domains for rank, member in part.members.items()})

    def _logs_of(self, domain: Domain) -> DomainLogs:
        ranks = [rank for rank in domain.ranks if rank in self.logs]
        logs = self.logs.among(ranks)
        roles = roles_of(logs.map(lambda log: list(log.groups)))
        members = {
            rank: Member(log, domain, roles[rank], is_incomplete=rank in self._incomplete) for rank, log in logs.items()
        }
        return DomainLogs(domain, ByRank(members))
