"""Values of one key on all ranks -> groups of ranks with equal values, and a `Divergence` titled with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.groups.domain import Allowed, reason_for, sides
from tpcompile.evidence.records import Divergence, DivergenceClass, Layer, value_item
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks

UNSET = "unset"
_BRIEF = 100
"""Characters of a value that a title shows; items of the divergence have all of it."""
_HASH = re.compile(r"\b((?:sha256|mix128|wrapped):[0-9a-f]{12})[0-9a-f]+(?:-[0-9a-f]+)?")
"""A hash in a value, of which a title shows 12 digits."""

Groups = Sequence[tuple[tuple[int, ...], str | None]]
"""(ranks, their value), largest group first; None when the ranks do not have the key."""


@dataclass(frozen=True)
class Kind:
    """How the differences of one group of facts are reported."""

    layer: Layer
    cause: Cause
    advice: str | None = None
    """What to do; None for what the cause says."""
    cls: DivergenceClass = DivergenceClass.CONTENT
    missing: str = UNSET
    """Text for ranks that do not have the key."""


def groups_of(values: Mapping[int, str | None]) -> Groups:
    """Ranks grouped by equal value, the largest group first."""
    return ByRank(values).sides()


def sides_text(groups: Iterable[tuple[Sequence[int], object]]) -> str:
    """`0.5 on rank 0, 0.25 on rank 1`."""
    return ", ".join(f"{value} on {named_ranks(ranks)}" for ranks, value in groups)


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
    """One difference, declared when it is in the allow-list; `found` replaces the title's values, `note` ends it."""
    ranks = [group for group, _ in groups]
    texts = [kind.missing if value is None else value for _, value in groups]
    items = [value_item(key, text) for text in texts]
    cls = kind.cls
    advice = kind.cause.advice if kind.advice is None else kind.advice
    reason = reason_for([kind.layer], [item.text for item in items], allowed)
    if reason:
        cls, advice = DivergenceClass.DECLARED, f"declared: {reason}"
    says = found or sides_text((group, _shown(value, kind)) for group, value in reversed(groups))
    end = f"; {note}" if note else ""
    return Divergence(
        layer=kind.layer,
        cls=cls,
        domain=domain,
        where="",
        groups=sides(tuple(ranks), items),
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
