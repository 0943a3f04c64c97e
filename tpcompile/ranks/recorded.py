"""This rank's record -> its side of an exchange: hashes first, the items of a layer when the judge asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpcompile.evidence.digests.digest import digest_rank, environment_items, layer_items
from tpcompile.evidence.judgement.verdict import Absent, Rules, conclude
from tpcompile.evidence.records import Check, Frozen, Item, Layer, RankDigest, RankRecord, Verdict
from tpcompile.ranks.exchange import Fetch, Side


class _Question(Frozen):
    """Which items the judge asks for."""

    index: int
    """Index of the compile; negative for the environment."""
    layer: Layer
    part: str


def record_side(record: RankRecord, rules: Rules, *, problems: Sequence[Check] = (), kind: Any = RankDigest) -> Side:
    """Side of an exchange made from a captured record.

    `problems` are checks that have already failed, `kind` is the type of a digest where its facts have one.
    """

    def judge(found: dict[int, RankDigest], absent: dict[int, str], ask: Fetch) -> Verdict:
        def fetch(rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
            return ask(rank, {"index": index, "layer": layer, "part": part}, tuple[Item, ...]) or ()

        return conclude(
            rules,
            list(found.values()),
            fetch,
            world_size=record.world_size,
            absent=[Absent(rank, seen) for rank, seen in absent.items()],
            problems=problems,
        )

    def answer(question: _Question) -> list[Any]:
        return [item.model_dump(mode="json") for item in _items(record, question)]

    digest = digest_rank(record).model_dump(mode="json")
    return Side(digest, answer, judge, kind=kind, question=_Question)


def _items(record: RankRecord, asked: _Question) -> Sequence[Item]:
    """The items of this rank that are asked for; none where it has no such compile."""
    if asked.index < 0:
        return environment_items(record)
    compiles = record.compiles[asked.index : asked.index + 1]
    return [item for one in compiles for item in layer_items(one, asked.layer, asked.part)]
