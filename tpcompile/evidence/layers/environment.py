"""Versions, environment variables and settings of a rank -> one item each; of the rank, not of a compile."""

from __future__ import annotations

from tpcompile.evidence.layers import process_settings as state
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation, LayerSpec
from tpcompile.evidence.records import Item, RankRecord, value_item
from tpcompile.evidence.records.causes import Cause


def _items(record: RankRecord) -> list[Item]:
    return [value_item(name, value) for name, value in sorted(record.environment)]


def _explain(difference: Difference) -> Explanation:
    """A setting that torch guards has the same cause as a failed guard on it."""
    row = difference.rows[0]
    found = state.cause_of(row.first.about)
    cause = Cause.ENVIRONMENT if found == Cause.PROCESS_STATE else found
    return Explanation(cause, Directness.STATE, row)


SPEC = LayerSpec(explain=_explain, of_rank=_items, is_ordered=False)
