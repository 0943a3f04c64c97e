"""Variables of a forked process -> Triton as an interpreter, where they ask for it.

Triton reads TRITON_INTERPRET when a kernel is declared, and its own library of kernels is declared when it is imported:
a process forked from one that has imported Triton imports it once more, in half a second. torch alone takes 8.
"""

from __future__ import annotations

import os
import sys

_NATIVE = "triton._C"
"""Can be initialised once."""


def import_triton_as_asked() -> None:
    """Where TRITON_INTERPRET is set, the next import of Triton is its first."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    names = [name for name in sys.modules if name.partition(".")[0] == "triton" and not name.startswith(_NATIVE)]
    for name in names:
        del sys.modules[name]
