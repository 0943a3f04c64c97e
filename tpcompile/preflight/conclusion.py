"""Values of one key by rank -> a titled `Divergence`; differences and absent ranks -> the checks, and the verdict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpcompile.errors import ExitCode
from tpcompile.evidence.groups.domain import Allowed, reason_for, sides
from tpcompile.evidence.judgement import leading as lead
from tpcompile.evidence.records import (
    Check,
    CheckId,
    Divergence,
    DivergenceClass,
    Layer,
    Status,
    Verdict,
    ranks_of,
    value_item,
)
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.preflight.facts import SHARDS

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


MAX_NAMED = 16
"""Differences of one group reported in full; the others are listed by name."""
MAX_LISTED = 100
"""Names listed in the details of a check."""


def reported(num_reported: int, absent: Mapping[int, str], *, timeout_s: float, silent: Sequence[int] = ()) -> Check:
    """Red when a rank is `absent` (rank -> its last published state) or `silent`: it did not send details."""
    late = [f"rank {rank} is missing; last seen {seen}" for rank, seen in sorted(absent.items())]
    late += [f"rank {rank} did not send its details" for rank in silent]
    late_ranks = sorted({*absent, *silent})
    cause = Cause.UNKNOWN
    if silent:
        cause = Cause.STOPPED_RESPONDING
    if absent:
        cause = Cause.NEVER_ARRIVED
    return Check(
        id=CheckId.REPORTED,
        status=Status.FAIL if late else Status.PASS,
        expected=f"every rank within {timeout_s:g} s",
        observed="; ".join(late) or f"all {num_reported}",
        ranks=tuple(late_ranks),
        cause=cause,
    )


def group_check(group: str, found: Sequence[Divergence], names: Sequence[str], num_keys: int) -> Check:
    """The check of one group of facts."""
    red = [divergence for divergence in found if divergence.is_red]
    equal = "consistent" if group == SHARDS else "equal"
    listed = f"{len(found)} declared" if found else f"{equal}: {num_keys}"
    details = names[:MAX_LISTED] if len(names) > MAX_NAMED else ()
    check = Check(
        name=f"{group} {equal} on all ranks",
        status=Status.PASS,
        expected=equal,
        observed=listed,
        details=tuple(details),
    )
    return check.model_copy(update=_differs(red, names)) if red else check


def _differs(red: Sequence[Divergence], names: Sequence[str]) -> dict[str, Any]:
    """Fields of the check, where some of these differ."""
    shown = red[:3]
    num_more = len(names) - len(shown)
    titles = "; ".join(divergence.title for divergence in shown)
    more = f"; {num_more} more" if len(red) > len(shown) else ""
    odd_ranks: set[int] = set()
    for divergence in red:  # ranks outside of the largest group; all ranks when two groups are equally large
        groups = divergence.groups
        has_largest = len(groups) == 1 or len(groups[0].ranks) > len(groups[1].ranks)
        odd_ranks |= set(ranks_of(groups[int(has_largest) :]))
    return {
        "status": Status.FAIL,
        "observed": titles + more,
        "ranks": tuple(sorted(odd_ranks)),
        "cause": red[0].cause,
    }


def conclude(
    checks: Sequence[Check],
    divergences: Sequence[Divergence],
    *,
    world_size: int,
    title: str,
    domains: dict[str, tuple[tuple[int, ...], ...]],
) -> Verdict:
    """Checks and divergences -> the verdict; the first red one is its summary."""
    leading = lead.of_run(checks, divergences, causes={CheckId.REPORTED})
    status, exit_code = Status.PASS, ExitCode.PASS
    summary = f"{world_size} ranks agree; {lead.num_passed(checks)} checks passed"
    if leading:
        status, exit_code = Status.FAIL, ExitCode.FAIL
        summary = lead.summary(leading)
    return Verdict(
        status=status,
        exit_code=exit_code,
        world_size=world_size,
        preset=title,
        summary=summary,
        lead=leading,
        checks=tuple(checks),
        divergences=tuple(divergences),
        domains=domains,
    )
