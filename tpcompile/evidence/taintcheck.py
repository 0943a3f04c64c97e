"""Taints of a run -> one check over them, and their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tpcompile.evidence.records import Check, CheckId, Grade, RankDigest, Status, Taint, items_of, ranks_of
from tpcompile.evidence.records.base import at_text
from tpcompile.evidence.taint import value_text
from tpcompile.evidence.text.ranks import ranks_text

_ALLOWED = "allowed"
_KINDS = (*(grade.value for grade in Grade), _ALLOWED)


def taint_check(mode: str, digests: Sequence[RankDigest], taints: Sequence[Taint], *, fails: bool) -> Check:
    """One check over the taints of a mode: listed, or red for the certain ones nobody allowed when `fails`."""
    prefix = f"{mode}/" if mode else ""
    mine = [taint for taint in taints if taint.where.startswith(prefix)]
    red = [taint for taint in mine if fails and _is_red(taint)]
    # What makes the check red comes first, what is allowed last.
    mine.sort(key=lambda taint: (taint not in red, bool(taint.reason)))
    status, observed = _counted(mine, red) if mine else _untainted(digests)
    is_code_seen = any(digest.is_code_seen for digest in digests)
    return Check(
        id=CheckId.UNTAINTED,
        mode=mode,
        status=status,
        expected="none, or allowed with a reason",
        observed=observed if is_code_seen else f"{observed}; traced code was not looked at",
        details=tuple(map(taint_text, mine)),
        line=mine[0].line if mine else None,
        ranks=ranks_of(mine[0].groups) if red else (),
    )


def _is_red(taint: Taint) -> bool:
    return taint.grade == Grade.CERTAIN and not taint.reason


def _untainted(digests: Sequence[RankDigest]) -> tuple[Status, str]:
    """What is said where nothing was found."""
    is_observed = any(digest.compiles for digest in digests)
    return (Status.PASS, "none") if is_observed else (Status.SKIPPED, "not observed")


def _counted(taints: Sequence[Taint], red: Sequence[Taint]) -> tuple[Status, str]:
    kinds = Counter(_ALLOWED if taint.reason else taint.grade.value for taint in taints)
    said = [f"{kinds[kind]} {kind}" for kind in sorted(kinds, key=_KINDS.index)]
    shown = min(taints, key=lambda taint: bool(taint.reason))
    return Status.FAIL if red else Status.INFO, f"{', '.join(said)}; first: {shown.text}"


def taint_text(taint: Taint) -> str:
    """One line of a report: grade, what, kind, where, values, what to do or why it is allowed."""
    values = [f"rank {ranks_text(ranks)}: {value_text(item)}" for ranks, item in items_of(taint.groups)]
    why = "; ".join([taint.kind.value, *values])
    end = f"allowed: {taint.reason}" if taint.reason else taint.suggestion
    return f"{taint.grade} {taint.what} {taint.text}{at_text(taint.line)} ({why}): {end}"
