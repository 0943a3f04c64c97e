"""A torchrun target: `tpcompile gate FLAGS` on a rank of a job, which goes on in this process, forked with torch.

torchrun ... tests/gate/in_job.py FLAGS

With the real one, the rank becomes a new interpreter that imports torch: 4 s of CPU on each.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from tpcompile import cli


def go_on(_path: str, command: Sequence[str]) -> NoReturn:
    """Stands for `os.execv` of `python -m MODULE ARGUMENTS`."""
    _python, _flag, module, *arguments = command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    os.execv = go_on  # type: ignore[assignment]
    sys.argv[0] = "tpcompile"
    sys.argv.insert(1, "gate")
    cli.main()
