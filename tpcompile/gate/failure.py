"""An exception of this rank -> the failed check: what it says, the user's line, and what kind of exception it is."""

from __future__ import annotations

from typing import Any

from tpcompile.errors import DivergenceError
from tpcompile.evidence.records import Check, CheckId, Status, UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.lines import innermost, traceback_of
from tpcompile.gate.machine import refused
from tpcompile.recording import CaptureSession
from tpcompile.sentinel.exception_cause import is_of_communication
from tpcompile.sentinel.flight import is_generated
from tpcompile.torch_api import watching
from tpcompile.torch_api.compiler import failed_compile


def failure_check(error: BaseException, session: CaptureSession | None, *, rank: int, mode: str, phase: str) -> Check:
    """The check that an exception of `rank` in that phase fails."""
    blamed = error.ranks if isinstance(error, DivergenceError) else ()
    place: dict[str, Any] = {"mode": mode, "status": Status.FAIL, "ranks": blamed or (rank,)}
    observed = refused(error)
    if observed:
        return Check(id=CheckId.MACHINE, expected="room", observed=f"{observed} (phase {phase})", **place)
    lines = str(error).strip().splitlines() or [""]
    return Check(
        id=CheckId.NO_ERROR,
        expected="no exception",
        observed=f"{type(error).__name__} in phase {phase}: {normalise.error(str(error))}",
        details=tuple(lines[1:12]),
        line=_line_of(error, session),
        cause=cause_of(error),
        **place,
    )


def cause_of(error: BaseException) -> Cause:
    """The kinds of exceptions that a difference between the ranks may explain; UNKNOWN for any other."""
    if watching.is_of_compiler(error):
        return Cause.COMPILE_FAILED
    return Cause.COMMUNICATION if is_of_communication(error) else Cause.UNKNOWN


def _line_of(error: BaseException, session: CaptureSession | None) -> UserLine | None:
    """The line that was being compiled, or the user's innermost line of the traceback, or the innermost one."""
    failed = failed_compile(error)
    if failed.stack:
        return innermost(failed.stack)
    if failed.compile_id and session is not None:
        return session.compile(failed.compile_id).line
    passed = traceback_of(error)
    return innermost([line for line in passed if not is_generated(line.file)] or passed)
