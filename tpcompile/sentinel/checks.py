"""A problem that the sentinel found -> the failed check of a verdict: pure."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.comparison.blamed import of_cause
from tpcompile.evidence.comparison.compiled_by_some import reason_cause
from tpcompile.evidence.records import Check, CheckId, CompileRecord, Status, UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.lines import called_at, entered_at
from tpcompile.evidence.text.reasons import Reason, nearest_reason, parse_reason
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import Position, RankState

_OF_LOSS = CheckId.ALIVE, "all ranks run to the end"
_OF_WAIT = CheckId.MOVING, "every wait can end"
_OF_VALUES = CheckId.EQUAL_VALUES, "the same values on all ranks"
"""Check, and its `expected` text."""


def one_rank_check(rank: int, position: Position, theirs: RankState, compile_: CompileRecord) -> Check:
    """The check for a compile at a position that a different rank passed without compiling."""
    reason = reason_of(compile_)
    why = f" because {reason.guard}" if reason.guard else ""
    at = f", now at {theirs.line}" if theirs.line else ""
    cause = Cause.RECOMPILE_LIMIT
    if not compile_.limit_reached:
        cause = reason_cause(reason) if compile_.recompile_reasons else Cause.UNKNOWN
    entered = called_at(compile_.stack) or entered_at(compile_.line, compile_.stack)
    return Check(
        id=CheckId.TOGETHER,
        status=Status.FAIL,
        expected="all ranks compile at the same call, or none",
        observed=f"rank {rank} compiled at {position}{why}; rank {theirs.rank} passed it without compiling{at}",
        line=of_cause(cause, reason.line or compile_.line, entered),
        ranks=(rank,),
        cause=cause,
    )


def reason_of(compile_: CompileRecord) -> Reason:
    """The guard that failed; for a first compile a `Reason` without text."""
    return parse_reason(nearest_reason(compile_.recompile_reasons))


def finding_check(finding: Finding) -> Check:
    """The check for a finding about ranks that cannot continue."""
    check_id, expected = _OF_LOSS if finding.is_loss else _OF_WAIT
    if finding.is_of_agreement:
        check_id, expected = _OF_VALUES
    return Check(
        id=check_id,
        status=Status.FAIL,
        expected=expected,
        observed=finding.observed,
        details=finding.details,
        line=finding.line,
        ranks=finding.ranks,
        is_rank_known=finding.is_rank_known,
        is_by_past=finding.is_by_past,
        left_out=finding.left_out,
        at_call=finding.at_call,
        cause=finding.cause,
    )


def failure_check(
    rank: int,
    error: BaseException,
    line: UserLine | None,
    *,
    failed: Sequence[CompileRecord],
    traced: UserLine | None,
    is_of_compiler: bool,
) -> Check:
    """The check for an exception that ends this rank; `failed` are its failed compiles.

    line: the user's innermost line in the traceback. traced: that in the program that the compiler traced.
    """
    if is_of_compiler and failed:
        # The traceback of such an error passes through the compiler: name it as a comparison of the ranks would.
        line = failed[-1].failure_line or traced or entered_at(failed[-1].line, failed[-1].stack) or line
    cause = Cause.COMPILE_FAILED if is_of_compiler else Cause.RAISED
    kind = type(error).__name__
    words = normalise.error(str(error))
    return Check(
        id=CheckId.NO_ERROR,
        status=Status.FAIL,
        expected="no exception",
        observed=f"{kind}: {words}",
        line=line,
        ranks=(rank,),
        cause=cause,
    )
