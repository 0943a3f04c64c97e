"""A finding or a failed check -> what the report shows first, and the same in one line."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType

from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import Check, CheckId, Divergence, Lead, RecompileCause, Status, Verdict
from tpcompile.evidence.records.base import at_text
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.hosts import on_hosts
from tpcompile.evidence.text.lines import is_packaged
from tpcompile.evidence.text.ranks import named_ranks

Hosts = Mapping[str, Sequence[int]]
_MAX_SAID = 100
"""Characters of cause and difference that a last line repeats."""
_WRONG = (
    CheckId.FORWARD, CheckId.GRADIENTS, CheckId.EAGER, CheckId.REPLAYED, CheckId.CLOBBERED, CheckId.TP_AWARE,
)  # fmt: skip
"""Checks whose failure says that a result is wrong, or will be."""


def of_run(
    checks: Sequence[Check],
    divergences: Sequence[Divergence],
    *,
    causes: Container[CheckId],
    recompiles: Sequence[RecompileCause] = (),
) -> Lead | None:
    """The failure to show first, by what it does to the run.

    A check of `causes` ended it; then what runs differently on some ranks, then wrong results, then guards that may
    fail on one rank some day, then all other failed checks. What only code of a library is to blame for comes last,
    after a guard of the user's that fails again and again.
    """
    failed = [check for check in checks if check.is_red]
    red = [divergence for divergence in divergences if divergence.is_red]
    for check in failed:
        follows = check.is_consequence or check.is_of_library
        if check.id in causes and not follows:
            return of_check(check)
    differing = find(red, lambda divergence: not divergence.is_latent)
    if differing:
        return of_divergence(differing)
    wrong = find(failed, lambda check: check.id in _WRONG)
    if wrong and red:
        return of_check(wrong)
    if red:
        return of_divergence(red[0])
    if wrong:  # what explains a wrong result is checked before it
        first_failed = find(failed, lambda check: not check.is_of_library)
        return of_check(first_failed or wrong)
    return _of_slow(failed, recompiles)


def _of_slow(failed: Sequence[Check], recompiles: Sequence[RecompileCause]) -> Lead | None:
    """The failure to show first where equal and right programs are only slow."""
    of_library = find(failed, lambda check: check.is_of_library)
    if of_library is None:
        return of_check(failed[0]) if failed else None
    for cause in recompiles:
        # A guard that a line of the user's asked for, and that fails more than once on a rank.
        is_users = cause.line is not None and not is_packaged(cause.line.file)
        if is_users and cause.count > len(cause.ranks):
            return _of_recompile(cause)
    return of_check(of_library)


def _of_recompile(cause: RecompileCause) -> Lead:
    on_all = f" in all on {len(cause.ranks)} ranks" if len(cause.ranks) > 1 else ""
    return Lead(
        says=f"recompiled {cause.count} times{on_all} by {cause.text}",
        ranks=cause.ranks,
        line=cause.line,
        do_first=cause.advice,
    )


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
        do_first=first_sentence(divergence.advice),
    )


def of_check(check: Check) -> Lead:
    """Cause, difference, ranks, line and advice of a failed check; one without a cause is shown by its name."""
    says = check.observed
    do_first = check.advice
    if check.cause == Cause.UNKNOWN:
        says = f"{check.name}: {check.observed}, expected {check.expected}"
    elif not do_first:
        do_first = first_sentence(check.cause.advice)
    return Lead(
        cause=check.cause,
        says=says,
        ranks=check.ranks,
        is_rank_known=check.is_rank_known,
        is_by_past=check.is_by_past,
        line=check.line,
        left_out=check.left_out,
        at_call=check.at_call,
        do_first=do_first,
    )


def cause_text(lead: Lead) -> str:
    """`autocast differs: autocast cpu: off / on`."""
    return lead.says if lead.cause == Cause.UNKNOWN else f"{lead.cause.value}: {lead.says}"


def lead_ranks_text(lead: Lead) -> str:
    """The ranks of a lead, as in `blamed_text`, and where they are in the mesh."""
    text = blamed_text(lead.ranks, is_known=lead.is_rank_known, hosts=lead.hosts)
    return f"{text}, {lead.place}" if lead.place else text


def blamed_text(ranks: Sequence[int], *, is_known: bool, hosts: Hosts = MappingProxyType({})) -> str:
    """`rank 1`, or `ranks 0-1 differ` where the evidence does not name the rank at fault; empty for no ranks.

    With the `hosts` of a job that has several, `rank 1 (node-b)`.
    """
    if not ranks:
        return ""
    text = f"{named_ranks(ranks)}{on_hosts(ranks, hosts)}"
    return text if is_known else f"{text} differ"


def summary(lead: Lead) -> str:
    """Cause, ranks and line in one line; of what followed from a branch its cause, where that is known."""
    if not lead.consequence:
        return _with_ranks(lead, cause_text(lead))
    parted = lead.says.removesuffix(f"; so {lead.consequence}")
    head = lead.consequence.partition(": ")[0]
    follows = head if head in list(Cause) else lead.consequence
    return f"{_with_ranks(lead, lead.cause.value)}: {parted}; so {follows}"


def short_summary(verdict: Verdict) -> str:
    """The same below a report that has said it at length: a long text, and what follows from it, are left out."""
    lead = verdict.lead
    if lead is None or verdict.summary != summary(lead) or len(cause_text(lead)) <= _MAX_SAID:
        return verdict.summary
    return _with_ranks(lead, lead.says if lead.cause == Cause.UNKNOWN else lead.cause.value)


def _with_ranks(lead: Lead, said: str) -> str:
    ranks = lead_ranks_text(lead)
    in_brackets = f" ({ranks})" if ranks else ""
    if lead.seen_at is None:
        return f"{said}{in_brackets}{at_text(lead.line)}"
    return f"{said}{in_brackets}{at_text(lead.seen_at)}; the ranks parted{at_text(lead.line)}"


def first_sentence(advice: str) -> str:
    """What to try first, of all that may be done."""
    sentence, mark, _ = advice.partition(". ")
    return f"{sentence}." if mark else sentence
