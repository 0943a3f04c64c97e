"""This rank's record -> its side of an exchange: hashes first, the items of a layer when the judge asks for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from tpcompile.evidence.digests.digest import digest_rank, environment_items, layer_items
from tpcompile.evidence.judgement.mesh_places import Coordinates, coordinates_of, with_places
from tpcompile.evidence.judgement.verdict import Absent, Rules, conclude
from tpcompile.evidence.records import Check, Frozen, Item, Layer, RankDigest, RankRecord, Verdict
from tpcompile.evidence.timeline.conclude import with_branch, without_branch
from tpcompile.evidence.timeline.flow import Flow
from tpcompile.ranks.exchange import Ask, Side

_MAX_FLOWS = 16
"""Ranks whose executed lines are read, of a domain and of all others: each costs a read, and a walk."""
_OWN = frozenset({"rank", "domain", "coordinate", "coordinates", "places", "rank_reads", "facts", "host"})
"""Fields of a digest in which ranks that compiled the same differ."""


def _known(flows: Mapping[int, Flow | None]) -> dict[int, Flow]:
    return {rank: flow for rank, flow in flows.items() if flow is not None}


def _nothing(_rank: int) -> None:
    """Stand for the flow of a program whose lines are not recorded."""


class _FlowQuestion(Frozen):
    """Asks for what the rank has executed."""

    flow: Literal[True] = True


class _Question(Frozen):
    """Which items the judge asks for."""

    index: int
    """Index of the compile; negative for the environment."""
    layer: Layer
    part: str


def record_side(
    record: RankRecord,
    rules: Rules,
    *,
    problems: Sequence[Check] = (),
    kind: Any = RankDigest,
    flow_of: Callable[[int], Flow | None] = _nothing,
    domain: Collection[int] | None = None,
    why_absent: Callable[[], Check | None] = lambda: None,
    host_of: Callable[[int], str] = lambda rank: "",
    coordinates: Callable[[], Coordinates] = dict,
) -> Side:
    """Side of an exchange made from a captured record.

    `problems` are checks that have already failed, `kind` is the type of a digest where its facts have one, `flow_of`
    gives what this rank has executed, and what a rank that does not take part has left. `domain` are the ranks
    that must agree; None: all. `why_absent` looks why ranks do not report, where nothing else has failed. `host_of`
    names the host of a rank that does not. `coordinates` has those of all ranks of the mesh, where a domain alone is
    judged.
    """

    def judge(found: dict[int, RankDigest], absent: dict[int, str], ask: Ask) -> Verdict:
        def fetch(rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
            return ask(rank, {"index": index, "layer": layer, "part": part}, tuple[Item, ...]) or ()

        why = why_absent() if absent and not problems else None
        verdict = conclude(
            rules,
            list(found.values()),
            fetch,
            world_size=record.world_size,
            absent=[Absent(rank, seen, host_of(rank)) for rank, seen in absent.items()],
            problems=[*problems, *([why] if why is not None else [])],
        )
        named = with_flow(verdict, found, ask)
        return with_places(named, coordinates() or coordinates_of(found.values()))

    def with_flow(verdict: Verdict, found: Mapping[int, RankDigest], ask: Ask) -> Verdict:
        own = flow_of(record.rank) if verdict.lead is not None else None
        if own is None:
            return verdict if flow_of is _nothing else without_branch(verdict)
        members = set(range(record.world_size) if domain is None else domain)
        walked = _walked(verdict, found.keys() - {record.rank}, record.rank)
        others = ask.many(walked, {"flow": True}, Flow)
        silent = [rank for rank in walked if rank not in others]  # killed since it gave its digest
        ended = {rank: flow_of(rank) for rank in [*silent, *_walked(verdict, members - found.keys(), record.rank)]}

        def elsewhere() -> dict[int, Flow]:
            ranks = sorted(set(range(record.world_size)) - members, key=lambda rank: abs(rank - record.rank))
            return _known({rank: flow_of(rank) for rank in ranks[:_MAX_FLOWS]})

        flows = _known({record.rank: own, **others, **ended})
        readable = {code.file for code in own.codes} | {one.file for one in own.before}
        named = with_branch(verdict, flows, readable, elsewhere)
        return named if own.packed or named is not verdict else without_branch(verdict)

    def answer(question: _Question | _FlowQuestion) -> Any:
        if isinstance(question, _FlowQuestion):
            flow = flow_of(record.rank)
            return None if flow is None else flow.model_dump(mode="json")
        return [item.model_dump(mode="json") for item in _items(record, question)]

    digest = digest_rank(record).model_dump(mode="json")
    return Side(digest, answer, judge, kind=kind, question=_Question | _FlowQuestion, own_fields=_OWN)


def _walked(verdict: Verdict, ranks: Collection[int], judge: int) -> list[int]:
    """Of these ranks, those whose executed lines are read: of each side that differs, those to blame, the nearest."""
    sides = [group.ranks[0] for divergence in verdict.divergences for group in divergence.groups]
    blamed = verdict.lead.ranks if verdict.lead is not None else ()
    nearest = sorted(ranks, key=lambda rank: abs(rank - judge))
    wanted = [rank for rank in dict.fromkeys([*sides, *blamed, *nearest]) if rank in ranks]
    return sorted(wanted[:_MAX_FLOWS])


def _items(record: RankRecord, asked: _Question) -> Sequence[Item]:
    """The items of this rank that are asked for; none where it has no such compile."""
    if asked.index < 0:
        return environment_items(record)
    compiles = record.compiles[asked.index : asked.index + 1]
    return [item for one in compiles for item in layer_items(one, asked.layer, asked.part)]
