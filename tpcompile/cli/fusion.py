"""`tpcompile fusion ARGUMENTS` -> `python -m tpcompile.fusion ARGUMENTS`, which may import torch."""

from __future__ import annotations

import os
import sys

import typer


def fusion(context: typer.Context) -> None:
    """Show which kernels a program became, what did not fuse and why, and what changed; `--help` says how."""
    os.execv(sys.executable, [sys.executable, "-m", "tpcompile.fusion", *context.args])
