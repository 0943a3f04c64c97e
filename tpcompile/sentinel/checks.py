"""What is wrong, as the sentinel knows it -> the check of a verdict: pure."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.alone import reason_cause
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import Check, CheckId, CompileRecord, Status, UserLine
from tpcompile.evidence.text.lines import entered_at
from tpcompile.evidence.text.reasons import Reason, nearest_reason, parse_reason
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import Position, RankState


def one_rank_check(rank: int, position: Position, theirs: RankState, compile_: CompileRecord | None) -> Check:
    """This rank compiled at a position that another one went past."""
    reason = _reason_of(compile_)
    why = f" because {reason.guard}" if reason else ""
    at = f", now at {theirs.line}" if theirs.line else ""
    own_line = compile_.line if compile_ else None
    return Check(
        id=CheckId.TOGETHER,
        mode="",
        status=Status.FAIL,
        expected="all ranks compile at the same call, or none",
        observed=f"rank {rank} compiled at {position}{why}; rank {theirs.rank} went on without it{at}",
        line=(reason.line if reason else None) or own_line,
        ranks=(rank,),
        cause=_one_rank_cause(reason, compile_),
    )


def finding_check(finding: Finding) -> Check:
    """The ranks cannot go on."""
    check_id = CheckId.ALIVE if finding.is_loss else CheckId.MOVING
    expected = "all ranks run to the end" if finding.is_loss else "every wait can end"
    return Check(
        id=check_id,
        mode="",
        status=Status.FAIL,
        expected=expected,
        observed=finding.observed,
        details=finding.details,
        line=finding.line,
        ranks=finding.ranks,
        cause=finding.cause,
    )


def failure_check(
    rank: int, error: BaseException, line: UserLine | None, *, failed: Sequence[CompileRecord], is_of_compiler: bool
) -> Check:
    """An exception ends this rank; `failed` are its compiles that failed."""
    if is_of_compiler and failed:
        # The traceback of such an error passes through the compiler: name it as a comparison of the ranks would.
        last = failed[-1]
        line = last.failure_line or entered_at(last.line, last.stack) or line
    return Check(
        id=CheckId.NO_ERROR,
        mode="",
        status=Status.FAIL,
        expected="no exception",
        observed=f"{type(error).__name__}: {_first_words(error)}",
        line=line,
        ranks=(rank,),
        cause=Cause.COMPILE_FAILED if is_of_compiler else Cause.RAISED,
    )


def _first_words(error: BaseException) -> str:
    """The first line of its text, with the second where the first only says that one follows."""
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    if not lines:
        return ""
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _reason_of(compile_: CompileRecord | None) -> Reason | None:
    text = nearest_reason(compile_.recompile_reasons) if compile_ else ""
    return parse_reason(text) if text else None


def _one_rank_cause(reason: Reason | None, compile_: CompileRecord | None) -> Cause:
    """Why one rank alone compiled, as far as that rank knows."""
    if compile_ is not None and compile_.limit_reached:
        return Cause.RECOMPILE_LIMIT
    return reason_cause(reason) if reason else Cause.UNKNOWN
