"""This rank's record -> its side of an exchange: hashes first, the items of a layer when the judge asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpcompile.evidence.digests.digest import digest_rank, environment_items, layer_items
from tpcompile.evidence.judgement.verdict import Absent, Rules, conclude
from tpcompile.evidence.records import Check, Item, Layer, RankDigest, RankRecord, Verdict
from tpcompile.ranks.exchange import Fetch, Question, Side


def record_side(record: RankRecord, rules: Rules, *, problems: Sequence[Check] = ()) -> Side:
    """Side of an exchange made from a captured record. `problems` are checks that have already failed."""

    def judge(found: dict[int, Any], absent: dict[int, str], ask: Fetch) -> Verdict:
        def fetch(rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
            answer = ask(rank, {"index": index, "layer": layer, "part": part})
            return [Item.model_validate(item) for item in answer or ()]

        return conclude(
            rules,
            [RankDigest.model_validate(value) for value in found.values()],
            fetch,
            world_size=record.world_size,
            absent=[Absent(rank, seen) for rank, seen in absent.items()],
            problems=problems,
        )

    def answer(question: Question) -> list[Any]:
        items = _items(record, question["index"], Layer(question["layer"]), question["part"])
        return [item.model_dump(mode="json") for item in items]

    return Side(digest_rank(record).model_dump(mode="json"), answer, judge)


def _items(record: RankRecord, index: int, layer: Layer, part: str) -> Sequence[Item]:
    return environment_items(record) if index < 0 else layer_items(record.compiles[index], layer, part)
