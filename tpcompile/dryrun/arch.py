"""`python -m tpcompile.dryrun.arch ARCH ARGUMENTS` -> `tpcompile dryrun`, in a process whose torch sees such a GPU."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from tpcompile.cli import ending
from tpcompile.fusion import no_gpu

seen = ""
"""The architecture that the torch of this process sees."""


def become(arch: str) -> NoReturn:
    """Start the command anew: torch has to find the GPU when it is imported."""
    os.execv(sys.executable, [sys.executable, "-m", __name__, arch, *sys.argv[1:]])


def _dryrun(arguments: list[str], **options: Any) -> None:
    """Make torch see the GPU, and go on as the command."""
    from tpcompile.dryrun import arch  # this module is `__main__`

    no_gpu.pretend(arch.seen)
    from tpcompile.dryrun.__main__ import app

    app(arguments, **options)


def main() -> None:
    """The command, for the architecture that comes first."""
    from tpcompile.dryrun import arch

    arch.seen = sys.argv.pop(1)
    command: Any = _dryrun
    ending.run(command, "tpcompile dryrun")


if __name__ == "__main__":
    main()
