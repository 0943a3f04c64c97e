"""Values of one key on all ranks -> groups of equal ranks, a title that names both sides, and a `Divergence`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.compare import Allowed
from tpcompile.evidence.records import Divergence, DivergenceClass, Layer, RankGroup, value_item
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
    by_value: dict[str | None, list[int]] = {}
    for rank in sorted(values):
        by_value.setdefault(values[rank], []).append(rank)
    found = [(tuple(ranks), value) for value, ranks in by_value.items()]
    return sorted(found, key=lambda entry: (-len(entry[0]), entry[0][0]))


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
    reason = _reason(kind.layer, [item.text for item in items], allowed)
    sides = [f"{_shown(value, kind)} on rank {ranks_text(ranks)}" for ranks, value in reversed(groups)]
    return Divergence(
        layer=kind.layer,
        cls=DivergenceClass.DECLARED if reason else kind.cls,
        domain=domain,
        where="",
        groups=tuple(RankGroup(ranks=r, item=item) for (r, _), item in zip(groups, items, strict=True)),
        title=f"{key}: {found or ', '.join(sides)}{f'; {note}' if note else ''}",
        cause=kind.cause,
        step=step,
        advice=f"declared: {reason}" if reason else f"{kind.advice} {kind.cause.advice}".strip(),
    )


def _reason(layer: Layer, texts: Sequence[str], allowed: Allowed) -> str:
    for allowed_layer, contains, reason in allowed:
        if allowed_layer == layer and all(contains in text for text in texts):
            return reason
    return ""


def _shown(value: str | None, kind: Kind) -> str:
    if value is None:
        return kind.missing
    text = _HASH.sub(r"\1", value)
    return f"'{text if len(text) <= _BRIEF else text[: _BRIEF - 3] + '...'}'"
