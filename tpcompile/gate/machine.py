"""Exception -> what the machine refused to a library, such as a file on a full disk; empty for any other exception.

torch.compile writes what it generates to disk: Inductor to TORCHINDUCTOR_CACHE_DIR, Triton to TRITON_CACHE_DIR, the
C++ compiler to TMPDIR. A full disk is not a finding about the program.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from tpcompile.errors import REFUSED_BY_MACHINE
from tpcompile.evidence.text.lines import is_installed, is_library, traceback_of

_IN_THE_WAY = {errno.EEXIST, errno.ENOTDIR}
"""A file exists where a library makes a directory."""
_FULL = os.strerror(errno.ENOSPC)
ADVICE = "free it, or set TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR and TMPDIR to a directory with room"


def refused(error: BaseException) -> str:
    """`cannot write PATH: REASON`, with what to do; empty for any other exception, and for a file of the user."""
    for cause in _chain(error):
        reason = _reason(cause)
        if reason:
            return f"{reason}; {ADVICE}"
    return ""


def _reason(error: BaseException) -> str:
    """What the machine refused to a library; empty for any other exception."""
    if isinstance(error, OSError) and error.errno in REFUSED_BY_MACHINE | _IN_THE_WAY and _is_of_library(error):
        return f"cannot write {error.filename or 'a file of the compiler'}: {error.strerror}"
    full = [line.strip() for line in str(error).splitlines() if _FULL in line]
    return f"cannot write a file: {full[0]}" if full else ""  # a compiler's own words


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and its causes, the original one first."""
    found = [error]
    while (before := found[-1].__cause__ or found[-1].__context__) and before not in found:
        found.append(before)
    return reversed(found)


def _is_of_library(error: BaseException) -> bool:
    """True when the innermost caller outside of the standard library is torch or an installed package."""
    callers = [line for line in traceback_of(error) if is_installed(line) or not is_library(line)]
    return bool(callers) and is_installed(callers[-1])
