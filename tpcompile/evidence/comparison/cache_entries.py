"""Cache entries whose guards failed, and the compile that followed -> why the closest entry failed."""

from __future__ import annotations

import math
from dataclasses import replace

from tpcompile.evidence.groups.domain import Seen
from tpcompile.evidence.iterables import grouped, indexed
from tpcompile.evidence.records import Layer
from tpcompile.evidence.text.reasons import nearest_reason, parse_reason

_UNKNOWN = math.inf


def reason_of(seen: Seen) -> str:
    """The reason of the entry whose inputs are most like those of the compile; "" for a first compile.

    Torch gives one reason per cache entry, the first guard that failed. With one entry for a prompt and one for a
    token, a call with a token and a newly frozen parameter fails in both: in the entry for the token on the parameter,
    in that for the prompt on the size. The former is the reason.
    """
    reasons = seen.compile.recompile_reasons
    if len(reasons) < 2:
        return nearest_reason(reasons)
    by_distance = grouped(reasons, lambda reason: _distance(seen, reason))
    if _UNKNOWN in by_distance:
        return nearest_reason(reasons)
    return nearest_reason(by_distance[min(by_distance)])


def _distance(seen: Seen, reason: str) -> float:
    """Number of input fields that differ between a compile and a reason's entry; unknown if either was not observed."""
    entry = seen.domain.compiled(seen.rank).newest_called.get(parse_reason(reason).entry)
    if entry is None:
        return _UNKNOWN
    before = indexed(replace(seen, compile=entry).observed(Layer.INPUTS), lambda item: item.about)
    now = indexed(seen.observed(Layer.INPUTS), lambda item: item.about)
    if not before or not now:
        return _UNKNOWN
    distance = 0
    for about in before.keys() & now:
        theirs, ours = before[about].fields, now[about].fields
        distance += sum(theirs[name] != ours[name] for name in theirs)
    return distance
