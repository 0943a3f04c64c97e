"""An exception of this rank -> the failed check: what it says, the user's line, and what kind of exception it is."""

from __future__ import annotations

import errno
import os
from typing import Any

from tpcompile.errors import REFUSED_BY_MACHINE, DivergenceError
from tpcompile.evidence.records import Check, CheckId, Status, UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.lines import innermost, is_installed, is_library, traceback_of
from tpcompile.recording import CaptureSession
from tpcompile.sentinel.exception_cause import is_of_communication
from tpcompile.sentinel.flight import is_generated
from tpcompile.torch_api import watching
from tpcompile.torch_api.compiler import failed_compile

_IN_THE_WAY = {errno.EEXIST, errno.ENOTDIR}
"""A file exists where a library makes a directory."""
_FULL = os.strerror(errno.ENOSPC)
ADVICE = "free it, or set TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR and TMPDIR to a directory with room"


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


def refused(error: BaseException) -> str:
    """`cannot write PATH: REASON`, with what to do, where the machine refused it to a library, such as a full disk.

    Empty for any other exception, and for a file of the user. torch.compile writes what it generates to disk: Inductor
    to TORCHINDUCTOR_CACHE_DIR, Triton to TRITON_CACHE_DIR, the C++ compiler to TMPDIR. A full disk is not a finding
    about the program.
    """
    chain = [error]  # the exception and its causes, the original one last
    while (before := chain[-1].__cause__ or chain[-1].__context__) and before not in chain:
        chain.append(before)
    for cause in reversed(chain):
        reason = _reason(cause)
        if reason:
            return f"{reason}; {ADVICE}"
    return ""


def _reason(error: BaseException) -> str:
    """What the machine refused to a library; empty for any other exception."""
    # The innermost caller outside of the standard library is torch or an installed package, or the user's code.
    callers = [line for line in traceback_of(error) if is_installed(line) or not is_library(line)]
    is_of_library = bool(callers) and is_installed(callers[-1])
    if isinstance(error, OSError) and error.errno in REFUSED_BY_MACHINE | _IN_THE_WAY and is_of_library:
        return f"cannot write {error.filename or 'a file of the compiler'}: {error.strerror}"
    full = [line.strip() for line in str(error).splitlines() if _FULL in line]
    return f"cannot write a file: {full[0]}" if full else ""  # a compiler's own words
