"""`tpcompile verify-win ARGUMENTS` -> `python -m tpcompile.fusion.win ARGUMENTS`, which imports torch."""

from __future__ import annotations

import os
import sys

import typer


def verify_win(context: typer.Context) -> None:
    """Measure a program in eager and in each mode of torch.compile, and say which to use; `--help` says how."""
    os.execv(sys.executable, [sys.executable, "-m", "tpcompile.fusion.win", *context.args])
