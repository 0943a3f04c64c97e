"""Taints of a run -> one check over them, and their text."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.records import Check, CheckId, Grade, RankDigest, Status, Taint
from tpcompile.evidence.taint import value_text
from tpcompile.evidence.text.ranks import ranks_text


def taint_check(mode: str, digests: Sequence[RankDigest], taints: Sequence[Taint], *, fails: bool) -> Check:
    """One check over the taints of a mode: listed, or red for the certain ones nobody allowed when `fails`."""
    mine = [taint for taint in taints if not mode or taint.where.startswith(f"{mode}/")]
    open_ = [taint for taint in mine if not taint.reason]
    red = [taint for taint in open_ if taint.grade == Grade.CERTAIN] if fails else []
    shown = red or open_ or mine
    rest = [taint for taint in mine if taint not in shown]
    is_seen = any(d.compiles for d in digests)
    observed = "none" if is_seen else "not observed"
    unread = "" if any(d.is_code_seen for d in digests) else "; traced code was not looked at"
    ranks = {rank for group in red[0].groups for rank in group.ranks} if red else set[int]()
    return Check(
        id=CheckId.UNTAINTED,
        mode=mode,
        status=_status(red, mine, is_seen=is_seen),
        expected="none, or allowed with a reason",
        observed=(_counted(mine) if mine else observed) + unread,
        details=tuple(taint_text(taint) for taint in (*shown, *rest)),
        line=shown[0].line if shown else None,
        ranks=tuple(sorted(ranks)),
    )


def _status(red: Sequence[Taint], mine: Sequence[Taint], *, is_seen: bool) -> Status:
    if red:
        return Status.FAIL
    if mine:
        return Status.INFO
    return Status.PASS if is_seen else Status.SKIPPED


def _counted(taints: Sequence[Taint]) -> str:
    open_ = [taint for taint in taints if not taint.reason]
    counts = {grade.value: sum(taint.grade == grade for taint in open_) for grade in Grade}
    counts["allowed"] = len(taints) - len(open_)
    said = [f"{count} {name}" for name, count in counts.items() if count]
    first = open_[0] if open_ else taints[0]
    return f"{', '.join(said)}; first: {first.text}"


def taint_text(taint: Taint) -> str:
    """One line of a report: grade, what, kind, where, values, what to do or why it is allowed."""
    values = [f"rank {ranks_text(g.ranks)}: {value_text(g.item)}" for g in taint.groups if g.item is not None]
    why = "; ".join([taint.kind.value, *values])
    end = f"allowed: {taint.reason}" if taint.reason else taint.suggestion
    at = f" at {taint.line}" if taint.line else ""
    return f"{taint.grade} {taint.what} {taint.text}{at} ({why}): {end}"
