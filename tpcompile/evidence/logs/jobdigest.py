"""Logs of a job + its domains -> digests of all ranks, in which only what may differ was parsed.

A compiled function whose text is equal on all ranks of its domain is not parsed: equal text has equal items. Small
jobs are parsed whole, so that the report can list what was normalised.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpcompile.evidence.compiles.events import OBSERVED_IN
from tpcompile.evidence.digests.digest import digest_rank, environment_items, frame_name, layer_items
from tpcompile.evidence.iterables import first
from tpcompile.evidence.logs.compiled import Frame, LoggedCompile
from tpcompile.evidence.logs.job import DomainLogs, Job, Member
from tpcompile.evidence.records import CompileDigest, CompileRecord, Item, Layer, LayerDigest, RankDigest, RankRecord
from tpcompile.evidence.text.normalise import GroupRoles

SMALL_BYTES = 1_000_000
"""Text of a job that is parsed whole."""
BUDGET_BYTES = 2_000_000
"""Differing text that is parsed first."""
MAX_BYTES = 32_000_000
"""Differing text that is parsed when the first part of it is not red; what is beyond makes a verdict incomplete."""

MAX_EQUAL = 200
"""Frames of equal text that are listed in a digest."""


@dataclass(frozen=True)
class Chosen:
    """What is parsed of the logs of a domain."""

    parsed: frozenset[Frame]
    by_text: frozenset[Frame]
    """Frames of equal text that are listed; more than a report needs are left out."""
    num_left: int
    """Frames that differ in their text and were not looked into."""


@dataclass(frozen=True)
class Selection:
    """What is parsed of a job."""

    domains: Mapping[str, Chosen]
    """Name of a domain -> what is parsed of its logs."""

    @property
    def num_left(self) -> int:
        """Frames that differ in their text and were not looked into."""
        return sum(chosen.num_left for chosen in self.domains.values())


def select(job: Job, *, budget_bytes: float = BUDGET_BYTES, small_bytes: int = SMALL_BYTES) -> Selection:
    """Choose what to parse: everything of a small job, else the first frames that differ."""
    size_bytes = sum(sum(logs.sizes.values()) for logs in job.domains)
    is_small = size_bytes <= small_bytes
    share_bytes = budget_bytes / len(job.domains)
    return Selection({logs.domain.name: _choose(logs, share_bytes, every_frame=is_small) for logs in job.domains})


def _choose(logs: DomainLogs, budget_bytes: float, *, every_frame: bool) -> Chosen:
    wanted = list(logs.sizes) if every_frame else logs.differing()
    used_bytes = itertools.accumulate(logs.sizes[frame] for frame in wanted)
    num_within = sum(used <= budget_bytes for used in used_bytes)
    parsed = wanted[: max(1, num_within)]
    others = frozenset(wanted)
    equal = [frame for frame in logs.sizes if frame not in others]
    among = frozenset(equal)

    def issuing(member: Member) -> tuple[Frame, ...]:
        """Frames with collectives in the order in which a rank compiled them."""
        compiles = member.log.sound.values()
        return tuple(compile_.frame for compile_ in compiles if compile_.issued and compile_.frame in among)

    is_reordered = logs.members.differ(issuing)
    listed = equal if is_reordered else equal[:MAX_EQUAL]
    return Chosen(frozenset(parsed), frozenset(listed), len(wanted) - len(parsed))


class JobDigest:
    """Digests of a job and the details behind them, parsed when asked for."""

    def __init__(self, job: Job, selection: Selection) -> None:
        self.selection, self.world_size = selection, job.world_size
        self.members = job.members
        self.torch_version = first(filter(None, (log.torch_version for log in job.logs.values()))) or ""
        """The version that a rank logged: it stands for the others, whose record may be missing."""
        read = self.members.map(lambda one: functools.partial(one.log.record, roles=GroupRoles(one.roles)))
        self.records = read.map(functools.lru_cache(maxsize=4))
        """Each reads a compile of its rank by the number, and keeps the last few."""

    def digests(self) -> list[RankDigest]:
        """One digest per rank that left a log."""
        return list(self.members.map(self._of_rank).values())

    def fetch(self, rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
        """Items of a layer; index -1 is the rank itself."""
        if index < 0:
            return environment_items(self._record(self.members[rank], ()))
        return layer_items(self.records[rank](index), layer, part)

    def _record(self, member: Member, compiles: tuple[CompileRecord, ...]) -> RankRecord:
        log, domain = member.log, member.domain
        return RankRecord(
            rank=log.rank,
            world_size=self.world_size,
            domain=domain.name,
            coordinate=domain.coordinates[log.rank],
            coordinates=dict(domain.places.get(log.rank, {})),
            environment=(("torch", log.torch_version or self.torch_version),),
            compiles=compiles,
            is_cut=member.is_incomplete,
        )

    def _of_rank(self, member: Member) -> RankDigest:
        chosen = self.selection.domains[member.domain.name]
        empty = digest_rank(self._record(member, ()))
        parts = [empty]
        for number, compile_ in member.log.sound.items():
            if compile_.frame in chosen.parsed:
                record = self.records[member.log.rank](number)
                part = digest_rank(self._record(member, (record,)))
                numbered = part.compiles[0].changed(index=number)
                parts.append(part.changed(compiles=(numbered,)))
            elif compile_.frame in chosen.by_text:
                digest = text_digest(member, compile_, number)
                parts.append(empty.changed(compiles=(digest,)))
        return _merged(parts)


def text_digest(member: Member, compile_: LoggedCompile, number: int) -> CompileDigest:
    """Digest of a compile whose text is equal on all ranks: the hash of the text is the hash of each of its layers."""
    sha = member.text_key(compile_)
    issued = member.issued(compile_)
    seen = {(Layer.GRAPH, ""), *(OBSERVED_IN[name] for name in OBSERVED_IN.keys() & compile_.names)}
    layers = [LayerDigest(layer=layer, part=part, sha256=sha, num_items=1) for layer, part in sorted(seen)]
    layers.append(LayerDigest(layer=Layer.COLLECTIVES, sha256=str(issued), num_items=len(issued)))
    frame = CompileRecord(compile_id=compile_.compile_id, function=compile_.function, line=compile_.line)
    return CompileDigest(
        index=number,
        compile_id=compile_.compile_id,
        phase="",
        frame=frame_name(frame),
        line=compile_.line,
        layers=tuple(layers),
    )


def _merged(parts: Sequence[RankDigest]) -> RankDigest:
    """Digests of one rank's compiles, one each -> its digest."""
    joined: dict[str, object] = {"is_cut": any(part.is_cut for part in parts)}
    for name, value in parts[0]:
        if isinstance(value, tuple):
            values = [getattr(part, name) for part in parts]
            joined[name] = tuple(itertools.chain.from_iterable(values))
    return parts[0].model_copy(update=joined)
