"""`tpcompile NAME ARGUMENTS` -> `python -m MODULE ARGUMENTS`, which imports torch: a command does not."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import typer

from tpcompile.errors import PreflightError


def require_torch() -> None:
    """Raise PreflightError where torch is not installed, as beside `tpcompile-reader`."""
    if importlib.machinery.PathFinder.find_spec("torch") is None:
        raise PreflightError("this command needs torch, which is not installed here: pip install tpcompile")


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Run that module in this process instead of the command. Raises PreflightError without torch."""
    require_torch()
    os.execv(sys.executable, [*becoming(module), *arguments])


def becoming(module: str) -> list[str]:
    """The command line of a process that runs a module, and which Ctrl-C ends in silence until its body begins."""
    return [sys.executable, "-m", "tpcompile.cli.becoming", module]


def _passed_on(module: str, what: str) -> Callable[[typer.Context], None]:
    """The command that becomes a module; `what` is its help, with what `--help` of the module adds."""

    def command(context: typer.Context) -> None:
        become(module, context.args)

    command.__doc__ = f"{what}; `--help` says how."
    return command


certify = _passed_on(
    "tpcompile.fastpath.certify", "Prove a fast path on the shards of 1, 2, 4 and 8 ranks, and write its certificate"
)
dryrun = _passed_on("tpcompile.dryrun", "Trace each rank of a job that is not started, without a GPU, and compare them")
fusion = _passed_on(
    "tpcompile.fusion", "Show which kernels a program became, what did not fuse and why, and what changed"
)
typecheck = _passed_on("tpcompile.typecheck", "Follow what is replicated, sharded and partial through a module")
verify_win = _passed_on(
    "tpcompile.fusion.win", "Measure a program in eager and in each mode of torch.compile, and say which to use"
)
