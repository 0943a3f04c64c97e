"""A finding or a failed check -> what the report shows first, and the same in one line."""

from __future__ import annotations

from collections.abc import Container, Sequence

from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import Check, CheckId, Divergence, Lead, Status
from tpcompile.evidence.records.base import at_text
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks


def of_run(checks: Sequence[Check], divergences: Sequence[Divergence], *, causes: Container[CheckId]) -> Lead | None:
    """The failure to show first: a check of `causes`, else a red divergence, else any other failed check."""
    failed = [check for check in checks if check.is_red]
    cause = find(failed, lambda check: check.id in causes and not check.is_consequence)
    if cause:
        return of_check(cause)
    differing = find(divergences, lambda divergence: divergence.is_red)
    if differing:
        return of_divergence(differing)
    if failed:
        return of_check(failed[0])
    return None


def num_passed(checks: Sequence[Check]) -> int:
    """Checks that passed."""
    return sum(check.status == Status.PASS for check in checks)


def of_divergence(divergence: Divergence) -> Lead:
    """Cause, difference, ranks, line and advice of a finding."""
    culprits = divergence.culprits
    return Lead(
        cause=divergence.cause,
        says=divergence.title.removeprefix(f"{divergence.cause}: "),  # the cause stands before it
        ranks=culprits or divergence.ranks,
        is_rank_known=bool(culprits),
        line=divergence.line,
        do_first=_first_sentence(divergence.advice),
    )


def of_check(check: Check) -> Lead:
    """The same of a failed check; one without a cause is shown by its name."""
    is_named = check.cause != Cause.UNKNOWN
    return Lead(
        cause=check.cause,
        says=check.observed if is_named else f"{check.name}: {check.observed}, expected {check.expected}",
        ranks=check.ranks,
        line=check.line,
        do_first=_first_sentence(check.cause.advice) if is_named else "",
    )


def cause_text(lead: Lead) -> str:
    """`autocast differs: autocast cpu: off / on`."""
    return lead.says if lead.cause == Cause.UNKNOWN else f"{lead.cause.value}: {lead.says}"


def lead_ranks_text(lead: Lead) -> str:
    """`rank 1`, or `ranks 0-1 differ` where the evidence does not name the rank at fault; empty for no ranks."""
    if not lead.ranks:
        return ""
    text = named_ranks(lead.ranks)
    return text if lead.is_rank_known else f"{text} differ"


def summary(lead: Lead) -> str:
    """Cause, ranks and line in one line."""
    ranks = lead_ranks_text(lead)
    in_brackets = f" ({ranks})" if ranks else ""
    return f"{cause_text(lead)}{in_brackets}{at_text(lead.line)}"


def _first_sentence(advice: str) -> str:
    sentence, mark, _ = advice.partition(". ")
    return f"{sentence}." if mark else sentence
