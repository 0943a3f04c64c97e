"""`python -m tpcompile.dryrun.arch ARCH ARGUMENTS` -> `tpcompile dryrun`, in a process whose torch sees such a GPU."""

from __future__ import annotations

import os
import runpy
import sys
from typing import NoReturn

from tpcompile.fusion import no_gpu

_MODULE = "tpcompile.dryrun"
seen = ""
"""The architecture that the torch of this process sees."""


def become(arch: str) -> NoReturn:
    """Start the command anew: torch has to find the GPU when it is imported."""
    os.execv(sys.executable, [sys.executable, "-m", f"{_MODULE}.arch", arch, *sys.argv[1:]])


def main() -> None:
    """Make torch see the GPU, and go on as the command."""
    from tpcompile.dryrun import arch as imported  # this module is `__main__`

    imported.seen = sys.argv.pop(1)
    no_gpu.pretend(imported.seen)
    runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
