"""`tpcompile NAME ARGUMENTS` -> `python -m MODULE ARGUMENTS`, which imports torch: a command does not."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer


def certify(context: typer.Context) -> None:
    """Prove a fast path on the shards of 1, 2, 4 and 8 ranks, and write its certificate; `--help` says how."""
    become("tpcompile.fastpath.certify", context.args)


def dryrun(context: typer.Context) -> None:
    """Trace each rank of a job that is not started, without a GPU, and compare them; `--help` says how."""
    become("tpcompile.dryrun", context.args)


def fusion(context: typer.Context) -> None:
    """Show which kernels a program became, what did not fuse and why, and what changed; `--help` says how."""
    become("tpcompile.fusion", context.args)


def typecheck(context: typer.Context) -> None:
    """Follow what is replicated, sharded and partial through a module; `--help` says how."""
    become("tpcompile.typecheck", context.args)


def verify_win(context: typer.Context) -> None:
    """Measure a program in eager and in each mode of torch.compile, and say which to use; `--help` says how."""
    become("tpcompile.fusion.win", context.args)


def require_torch() -> None:
    """Raise PreflightError where torch is not installed, as beside `tpcompile-reader`."""
    if importlib.machinery.PathFinder.find_spec("torch") is None:
        from tpcompile.errors import PreflightError

        raise PreflightError("this command needs torch, which is not installed here: pip install tpcompile")


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Run that module in this process instead of the command. Raises PreflightError without torch."""
    require_torch()
    os.execv(sys.executable, [*becoming(module), *arguments])


def becoming(module: str) -> list[str]:
    """The command line of a process that runs a module, and which Ctrl-C ends in silence until its body begins."""
    return [sys.executable, "-m", "tpcompile.cli.becoming", module]
