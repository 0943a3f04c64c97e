"""`tpcompile NAME ARGUMENTS` -> `python -m MODULE ARGUMENTS`, which imports torch: a command does not."""

from __future__ import annotations

import os
import sys

import typer


def certify(context: typer.Context) -> None:
    """Prove a fast path on the shards of 1, 2, 4 and 8 ranks, and write its certificate; `--help` says how."""
    _become("tpcompile.fastpath.certify", context)


def faults(context: typer.Context) -> None:
    """Planted faults and healthy programs: `list` what there is, `run` them for real; `--help` says how."""
    _become("tpcompile.faults", context)


def fusion(context: typer.Context) -> None:
    """Show which kernels a program became, what did not fuse and why, and what changed; `--help` says how."""
    _become("tpcompile.fusion", context)


def typecheck(context: typer.Context) -> None:
    """Follow what is replicated, sharded and partial through a module; `--help` says how."""
    _become("tpcompile.typecheck", context)


def verify_win(context: typer.Context) -> None:
    """Measure a program in eager and in each mode of torch.compile, and say which to use; `--help` says how."""
    _become("tpcompile.fusion.win", context)


def _become(module: str, context: typer.Context) -> None:
    os.execv(sys.executable, [sys.executable, "-m", module, *context.args])
