"""Cache entries that did not fit, and the compile that followed -> why the entry that was meant did not fit."""

from __future__ import annotations

import math
from dataclasses import replace

from tpcompile.evidence.domain import Seen
from tpcompile.evidence.records import Item, Layer
from tpcompile.evidence.several import grouped, indexed
from tpcompile.evidence.text.reasons import nearest_reason, parse_reason

_UNKNOWN = math.inf


def reason_of(seen: Seen) -> str:
    """The reason of the entry whose inputs are most like those that came; "" for a first compile.

    Torch gives one reason per entry, the first guard that failed. With an entry for the prompt and one for a token, a
    parameter that was frozen fails in the second, and the size of the token in the first: that entry was never meant.
    """
    reasons = seen.compile.recompile_reasons
    if len(reasons) < 2:
        return nearest_reason(reasons)
    by_distance = grouped(reasons, lambda reason: _distance(seen, reason))
    if _UNKNOWN in by_distance:
        return nearest_reason(reasons)
    return nearest_reason(by_distance[min(by_distance)])


def _distance(seen: Seen, reason: str) -> float:
    """Fields of inputs in which the entry of a reason and a compile differ; unknown where one was not observed."""
    entries = seen.digest.called(parse_reason(reason).entry)
    before = _inputs(replace(seen, compile=entries[-1])) if entries else {}
    now = _inputs(seen)
    if not before or not now:
        return _UNKNOWN
    return sum(_num_differing(before[about], now[about]) for about in before.keys() & now)


def _inputs(seen: Seen) -> dict[str, Item]:
    return indexed(seen.observed(Layer.INPUTS), lambda item: item.about)


def _num_differing(theirs: Item, ours: Item) -> int:
    return sum(theirs.fields[name] != ours.fields[name] for name in theirs.fields)
