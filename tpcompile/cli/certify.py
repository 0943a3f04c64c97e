"""`tpcompile certify ARGUMENTS` -> `python -m tpcompile.fastpath.certify ARGUMENTS`, which imports torch."""

from __future__ import annotations

import os
import sys

import typer


def certify(context: typer.Context) -> None:
    """Prove a fast path on the shards of 1, 2, 4 and 8 ranks, and write its certificate; `--help` says how."""
    os.execv(sys.executable, [sys.executable, "-m", "tpcompile.fastpath.certify", *context.args])
