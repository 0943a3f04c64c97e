"""Taints of a run -> one check over them, and their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tpcompile.evidence.iterables import first
from tpcompile.evidence.judgement.checks import phase_prefix
from tpcompile.evidence.judgement.rank_taint import value_text
from tpcompile.evidence.records import Check, CheckId, Grade, RankDigest, Status, Taint, items_of, ranks_of
from tpcompile.evidence.records.base import at_text, lines_of
from tpcompile.evidence.text.ranks import named_ranks

_ALLOWED = "allowed"
_KINDS = (*(grade.value for grade in Grade), _ALLOWED)


def taint_check(mode: str, digests: Sequence[RankDigest], taints: Sequence[Taint], *, fails: bool) -> Check:
    """One check over the taints of a mode: for information, or red when `fails` and a certain one is not allowed."""
    prefix = phase_prefix(mode)
    certain: list[Taint] = []
    others: list[Taint] = []
    for taint in taints:
        if taint.where.startswith(prefix):
            can_fail = taint.grade == Grade.CERTAIN and not taint.reason
            (certain if can_fail else others).append(taint)
    # Taints that can fail the check come first, allowed ones last.
    mine = certain + sorted(others, key=lambda taint: bool(taint.reason))
    status, observed = Status.SKIPPED, "not observed"
    if mine:
        kinds = Counter(_ALLOWED if taint.reason else taint.grade.value for taint in mine)
        counts = [f"{kinds[kind]} {kind}" for kind in sorted(kinds, key=_KINDS.index)]
        status, observed = Status.INFO, f"{', '.join(counts)}; first: {mine[0].text}"
    elif any(digest.compiles for digest in digests):
        status, observed = Status.PASS, "none"
    is_code_seen = any(digest.is_code_seen for digest in digests)
    if not is_code_seen:
        observed = f"{observed}; traced code was not searched"
    check = Check(
        id=CheckId.UNTAINTED,
        mode=mode,
        status=status,
        expected="none, or allowed with a reason",
        observed=observed,
        details=tuple(map(taint_text, mine)),
        line=first(lines_of(mine[:1])),
    )
    is_red = fails and bool(certain)
    if not is_red:
        return check
    return check.changed(status=Status.FAIL, ranks=ranks_of(mine[0].groups))


def taint_text(taint: Taint) -> str:
    """One line of a report: grade, what, kind, where, values, what to do or why it is allowed."""
    values = [f"{named_ranks(ranks)}: {value_text(item)}" for ranks, item in items_of(taint.groups)]
    why = "; ".join([taint.kind.value, *values])
    return f"{taint.grade} {taint.what} {taint.text}{at_text(taint.line)} ({why}): {taint.advice}"
