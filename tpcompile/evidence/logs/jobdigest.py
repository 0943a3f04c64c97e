"""Logs of a job + its domains -> digests of all ranks, in which only what may differ was parsed.

A compiled function whose text is equal on all ranks of its domain needs no parsing: equal text has equal items. In
small jobs everything is parsed all the same, so that the report can say what was normalised.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tpcompile.evidence.digest import digest_rank, environment_items, frame_name, layer_items
from tpcompile.evidence.logs.domains import Domain, Domains, roles_of
from tpcompile.evidence.logs.ranklog import LoggedCompile, RankLog, records_of
from tpcompile.evidence.records import CompileDigest, CompileRecord, Item, Layer, LayerDigest, RankDigest, RankRecord

SMALL_BYTES = 1_000_000
"""Text of a job that is parsed whole."""
BUDGET_BYTES = 2_000_000
"""Differing text that is parsed first."""
MAX_BYTES = 32_000_000
"""Differing text that is parsed when the first part of it is not red; what is beyond makes a verdict incomplete."""

MAX_EQUAL = 200
"""Frames of equal text that are listed in a digest."""

Frame = tuple[str, str, int]
_PARTS = {
    "describe_source": (Layer.INPUTS, ""),
    "dynamo_cpp_guards_str": (Layer.GUARDS, ""),
    "aot_forward_graph": (Layer.LOWERED, "forward"),
    "aot_inference_graph": (Layer.LOWERED, "forward"),
    "aot_backward_graph": (Layer.LOWERED, "backward"),
    "inductor_output_code": (Layer.KERNELS, "forward"),
}


@dataclass
class Job:
    """Logs of all ranks, and which of them must agree."""

    logs: dict[int, RankLog]
    domains: Domains
    world_size: int
    incomplete: frozenset[int] = frozenset()
    """Ranks whose log lacks something: what they did not compile was not observed."""
    roles: dict[int, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = {rank: list(log.groups) for rank, log in self.logs.items()}
        for domain in self.domains.domains:
            self.roles |= roles_of(groups, [log.rank for log in self.logs_of(domain)])

    def logs_of(self, domain: Domain) -> list[RankLog]:
        """The logs there are of a domain, by rank."""
        return [self.logs[rank] for rank in domain.ranks if rank in self.logs]

    def role(self, rank: int, group: str) -> str:
        """What stands for a group on all ranks of the domain."""
        return self.roles[rank].get(group, group)

    def text_key(self, rank: int, compile_: LoggedCompile) -> str:
        """Equal for compiles whose whole text is equal, roles of groups included."""
        return " ".join([compile_.sha, *(self.role(rank, group) for group in compile_.groups)])


def open_frames(job: Job, domain: Domain) -> list[Frame]:
    """Frames whose text is not equal on all ranks of a domain, in order of appearance."""
    logs = job.logs_of(domain)
    texts: dict[Frame, dict[int, list[str]]] = {}
    for log in logs:
        for compile_ in log.compiles:
            by_rank = texts.setdefault(compile_.frame, {other.rank: [] for other in logs})
            by_rank[log.rank].append(job.text_key(log.rank, compile_))
    return [frame for frame, by_rank in texts.items() if len(set(map(tuple, by_rank.values()))) > 1]


@dataclass(frozen=True)
class Selection:
    """What is parsed, by domain."""

    parsed: Mapping[str, frozenset[Frame]]
    by_text: Mapping[str, frozenset[Frame]]
    """Frames of equal text that are listed; more than a report needs are left out."""
    num_left: int = 0
    """Frames that differ in their text and were not looked into."""


def select(job: Job, *, budget_bytes: float = BUDGET_BYTES, small_bytes: int = SMALL_BYTES) -> Selection:
    """Choose what to parse: everything of a small job, else the first of what differs."""
    sizes = {domain.name: _sizes(job, domain) for domain in job.domains.domains}
    is_small = sum(sum(of_domain.values()) for of_domain in sizes.values()) <= small_bytes
    share_bytes = budget_bytes / len(sizes)
    parsed: dict[str, frozenset[Frame]] = {}
    by_text: dict[str, frozenset[Frame]] = {}
    num_left = 0
    for domain in job.domains.domains:
        every = list(sizes[domain.name])
        chosen = every if is_small else open_frames(job, domain)
        kept = _within(chosen, sizes[domain.name], share_bytes)
        parsed[domain.name] = frozenset(kept)
        by_text[domain.name] = _listed(job, domain, every, frozenset(chosen))
        num_left += len(chosen) - len(kept)
    return Selection(parsed, by_text, num_left)


def _listed(job: Job, domain: Domain, every: Sequence[Frame], chosen: frozenset[Frame]) -> frozenset[Frame]:
    """Frames of equal text to list: the first, unless ranks made them in another order."""
    equal = [frame for frame in every if frame not in chosen]
    among = frozenset(equal)
    orders = {tuple(c.frame for c in log.compiles if c.issued and c.frame in among) for log in job.logs_of(domain)}
    return frozenset(equal[:MAX_EQUAL] if len(orders) == 1 else equal)


def _sizes(job: Job, domain: Domain) -> dict[Frame, int]:
    """Bytes of text by frame, in order of appearance."""
    sizes: Counter[Frame] = Counter()
    for log in job.logs_of(domain):
        for compile_ in log.compiles:
            sizes[compile_.frame] += compile_.size_bytes
    return dict(sizes)


def _within(frames: Sequence[Frame], sizes: Mapping[Frame, int], budget_bytes: float) -> list[Frame]:
    """The first frames that fit into a budget; one at least."""
    kept: list[Frame] = []
    used = 0
    for frame in frames:
        used += sizes[frame]
        if kept and used > budget_bytes:
            break
        kept.append(frame)
    return kept


class JobDigest:
    """Digests of a job and the details behind them, parsed when asked for."""

    def __init__(self, job: Job, selection: Selection) -> None:
        self.job, self.selection = job, selection
        self.records = {rank: records_of(log, job.roles[rank]) for rank, log in job.logs.items()}

    def digests(self) -> list[RankDigest]:
        """One digest per rank that left a log."""
        return [self._of_rank(log) for log in self.job.logs.values()]

    def fetch(self, rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
        """Items of a layer; index -1 is the rank itself."""
        if index < 0:
            return environment_items(self._rank(self.job.logs[rank], ()))
        return layer_items(self.records[rank](index), layer, part)

    def _rank(self, log: RankLog, compiles: tuple[CompileRecord, ...]) -> RankRecord:
        domain = self.job.domains.of(log.rank)
        return RankRecord(
            rank=log.rank,
            world_size=self.job.world_size,
            domain=domain.name,
            coordinate=domain.ranks.index(log.rank),
            environment=(("torch", log.torch_version or "a version that does not log itself"),),
            compiles=compiles,
            is_cut=log.rank in self.job.incomplete,
        )

    def _of_rank(self, log: RankLog) -> RankDigest:
        domain = self.job.domains.of(log.rank).name
        parts = [digest_rank(self._rank(log, ()))]
        parsed, by_text = self.selection.parsed[domain], self.selection.by_text[domain]
        for number, compile_ in enumerate(log.compiles):
            if compile_.frame in parsed:
                part = digest_rank(self._rank(log, (self.records[log.rank](number),)))
                parts.append(_numbered(part, number))
            elif compile_.frame in by_text:
                digest = text_digest(self.job, log.rank, number)
                parts.append(parts[0].model_copy(update={"compiles": (digest,)}))
        return _merged(parts)


def text_digest(job: Job, rank: int, number: int) -> CompileDigest:
    """Digest of a compile whose text is equal on all ranks: the hash of the text stands for every layer of it."""
    compile_ = job.logs[rank].compiles[number]
    sha = job.text_key(rank, compile_)
    issued = [(op, job.role(rank, group)) for op, group in compile_.issued]
    seen = {_PARTS[name] for name in compile_.names if name in _PARTS}
    layers = [LayerDigest(layer=layer, part=part, sha256=sha, num_items=1) for layer, part in sorted(seen)]
    layers.append(LayerDigest(layer=Layer.GRAPH, sha256=sha, num_items=1))
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


def _numbered(part: RankDigest, number: int) -> RankDigest:
    compiles = [compile_.model_copy(update={"index": number}) for compile_ in part.compiles]
    return part.model_copy(update={"compiles": tuple(compiles)})


def _merged(parts: Sequence[RankDigest]) -> RankDigest:
    """Digests of one rank's compiles, one each -> its digest."""
    names = [name for name, value in parts[0] if isinstance(value, tuple)]
    joined: dict[str, object] = {name: _concatenated(parts, name) for name in names}
    joined["is_cut"] = any(part.is_cut for part in parts)
    return parts[0].model_copy(update=joined)


def _concatenated(parts: Iterable[RankDigest], name: str) -> tuple[object, ...]:
    return tuple(itertools.chain.from_iterable(getattr(part, name) for part in parts))
