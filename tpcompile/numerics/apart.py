"""An op whose inputs do not go together -> which of them is the wrong one: rows of the mistakes' table.

Each input may be right by itself: rows of other places than those beside them, a count of the rank's own under a sum
that is made later, what a loop over the rank's part has in the end.
"""

from __future__ import annotations

from typing import Any

from tpcompile.evidence.records import MistakeKind
from tpcompile.numerics.judged import SUMMANDS, Judged
from tpcompile.numerics.judged_run import Evidence
from tpcompile.numerics.op_names import STATISTICS

_BY_PLACE = {"aten.mul", "aten.div", "aten.add", "aten.sub", "aten.where", "aten.masked_fill"}
"""Ops that combine the same places of what they are given."""
_COUNTS = STATISTICS | {"aten.sum", "aten.count_nonzero", "aten.bincount"}
"""Ops that count, or combine, what a rank has."""


def other_places(place: int, found: Evidence) -> dict[str, Any]:
    """A part of the reference, in its order, beside rows that the program holds in an order of its own."""
    sources = found.values[place].sources
    own = [source for source in sources if source in found.own_order]
    parts = [source for source in found.given(place, Judged.PART) if source not in own]
    if found.values[place].name not in _BY_PLACE or not own or not parts:
        return {}
    begun = parts[0]
    while earlier := [source for source in found.given(begun, Judged.PART) if source not in found.own_order]:
        begun = earlier[0]
    value = found.values[begun]
    # What is wrong is said in the innermost line that the reference does not run.
    own_lines = (line for line in (value.line, *value.callers) if line is not None and line not in found.known.lines)
    return {"kind": MistakeKind.OTHER_PART, "place": begun, "line": next(own_lines, value.line)}


def own_divisor(place: int, found: Evidence) -> dict[str, Any]:
    """A summand that is divided, which is right, by a number of this rank's alone, which is not."""
    value = found.values[place]
    if value.name != "aten.div" or len(value.sources) != 2:
        return {}
    divided, divisor = value.sources
    is_linear = found.judged[divided] in SUMMANDS and found.judged[divisor] not in SUMMANDS
    if not is_linear or found.is_known(found.values[divisor]):
        return {}
    count = found.nearest_unknown(divisor, _COUNTS)
    return {} if count is None else {"kind": MistakeKind.LOCAL_STATISTIC, "place": count}


def carried(place: int, found: Evidence) -> dict[str, Any]:
    """What a loop over this rank's part of the places has, which one rank's loop has after all of them."""
    is_of_part = not found.of_part.isdisjoint(found.unknown_behind(place))
    return {"kind": MistakeKind.CROSSES} if is_of_part else {}
