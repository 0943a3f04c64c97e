"""`tpcompile faults ARGUMENTS` -> `python -m tpcompile.faults ARGUMENTS`, which imports torch: a command does not."""

from __future__ import annotations

import os
import sys

import typer


def faults(context: typer.Context) -> None:
    """Planted faults and healthy programs: `list` what there is, `run` them for real; `--help` says how."""
    os.execv(sys.executable, [sys.executable, "-m", "tpcompile.faults", *context.args])
