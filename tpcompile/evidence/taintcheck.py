"""Taints of a run -> one check over them, and their text."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.records import Check, CheckId, Grade, RankDigest, Status, Taint
from tpcompile.evidence.taint import value_text
from tpcompile.evidence.text.ranks import ranks_text


def taint_check(mode: str, digests: Sequence[RankDigest], taints: Sequence[Taint], *, fails: bool) -> Check:
    """One check over the taints of a mode: listed, or red for the certain ones nobody allowed when `fails`."""
    mine = [taint for taint in taints if not mode or taint.where.startswith(f"{mode}/")]
    ordered = sorted(mine, key=lambda taint: bool(taint.reason))
    red = [taint for taint in ordered if _is_red(taint)] if fails else []
    if red:
        ordered = [*red, *(taint for taint in ordered if taint not in red)]
    groups = red[0].groups if red else ()
    return Check(
        id=CheckId.UNTAINTED,
        mode=mode,
        status=_status(red, mine, digests),
        expected="none, or allowed with a reason",
        observed=_observed(mine, digests),
        details=tuple(map(taint_text, ordered)),
        line=ordered[0].line if ordered else None,
        ranks=tuple(sorted(rank for group in groups for rank in group.ranks)),
    )


def _is_red(taint: Taint) -> bool:
    return taint.grade == Grade.CERTAIN and not taint.reason


def _status(red: Sequence[Taint], mine: Sequence[Taint], digests: Sequence[RankDigest]) -> Status:
    if red:
        return Status.FAIL
    if mine:
        return Status.INFO
    return Status.PASS if _is_observed(digests) else Status.SKIPPED


def _is_observed(digests: Sequence[RankDigest]) -> bool:
    return any(digest.compiles for digest in digests)


def _observed(taints: Sequence[Taint], digests: Sequence[RankDigest]) -> str:
    is_code_seen = any(digest.is_code_seen for digest in digests)
    unread = "" if is_code_seen else "; traced code was not looked at"
    if taints:
        return _counted(taints) + unread
    return ("none" if _is_observed(digests) else "not observed") + unread


def _counted(taints: Sequence[Taint]) -> str:
    not_allowed = [taint for taint in taints if not taint.reason]
    grades = [taint.grade for taint in not_allowed]
    counts = {grade.value: grades.count(grade) for grade in Grade}
    counts["allowed"] = len(taints) - len(not_allowed)
    said = [f"{count} {name}" for name, count in counts.items() if count]
    first = (*not_allowed, *taints)[0]
    return f"{', '.join(said)}; first: {first.text}"


def taint_text(taint: Taint) -> str:
    """One line of a report: grade, what, kind, where, values, what to do or why it is allowed."""
    values = [f"rank {ranks_text(group.ranks)}: {value_text(group.item)}" for group in taint.groups if group.item]
    why = "; ".join([taint.kind.value, *values])
    end = f"allowed: {taint.reason}" if taint.reason else taint.suggestion
    at = f" at {taint.line}" if taint.line else ""
    return f"{taint.grade} {taint.what} {taint.text}{at} ({why}): {end}"
