"""Values of one key on all ranks -> groups of equal ranks, a title that names both sides, and a `Divergence`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.domain import Allowed, group_by, reason_for, sides
from tpcompile.evidence.records import Divergence, DivergenceClass, Layer, value_item
from tpcompile.evidence.text.ranks import ranks_text

UNSET = "unset"
_BRIEF = 100
_HASH = re.compile(r"\b((?:sha256|mix128|wrapped):[0-9a-f]{12})[0-9a-f]+(?:-[0-9a-f]+)?")

Groups = list[tuple[tuple[int, ...], str | None]]
"""(ranks, their value), largest group first; None for a key the ranks do not have."""


@dataclass(frozen=True)
class Kind:
    """How the differences of one group of facts are reported."""

    layer: Layer
    cause: Cause
    advice: str
    cls: DivergenceClass = DivergenceClass.CONTENT
    missing: str = UNSET
    """What a key means on ranks that do not have it."""


def groups_of(values: Mapping[int, str | None]) -> Groups:
    """Ranks by equal value; the odd ones out come last."""
    return [(ranks, values[ranks[0]]) for ranks in group_by(values)]


def odd_ranks(groups: Sequence[tuple[tuple[int, ...], object]]) -> tuple[int, ...]:
    """Ranks outside of the majority; all of them when there is none."""
    is_majority = len(groups) == 1 or len(groups[0][0]) > len(groups[1][0])
    return tuple(sorted(rank for ranks, _ in groups[int(is_majority) :] for rank in ranks))


def difference(
    key: str,
    groups: Groups,
    *,
    kind: Kind,
    domain: str,
    allowed: Allowed = (),
    note: str = "",
    found: str = "",
    step: int | None = None,
) -> Divergence:
    """One difference, declared when the allow-list says why; the title ends in `note`, or says `found` only."""
    items = [value_item(key, kind.missing if value is None else value) for _, value in groups]
    cls, advice = kind.cls, f"{kind.advice} {kind.cause.advice}".strip()
    reason = reason_for(kind.layer, items, allowed)
    if reason:
        cls, advice = DivergenceClass.DECLARED, f"declared: {reason}"
    sides_text = [f"{_shown(value, kind)} on rank {ranks_text(ranks)}" for ranks, value in reversed(groups)]
    says = found or ", ".join(sides_text)
    end = f"; {note}" if note else ""
    return Divergence(
        layer=kind.layer,
        cls=cls,
        domain=domain,
        where="",
        groups=sides(tuple(ranks for ranks, _ in groups), items),
        title=f"{key}: {says}{end}",
        cause=kind.cause,
        step=step,
        advice=advice,
    )


def _shown(value: str | None, kind: Kind) -> str:
    if value is None:
        return kind.missing
    text = _HASH.sub(r"\1", value)
    cut = f"{text[: _BRIEF - 3]}..." if len(text) > _BRIEF else text
    return f"'{cut}'"
