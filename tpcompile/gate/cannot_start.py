"""A run that cannot start or be written -> one line on stderr, and a verdict for the launcher."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from tpcompile.config import JobConfig
from tpcompile.errors import ExitCode, TpCompileError
from tpcompile.evidence.records import Check, CheckId, Status, Verdict
from tpcompile.evidence.rundir import RunDir


def refuse(error: TpCompileError, config: JobConfig, run_dir: Path | str | None, *, rank: int, quiet: bool) -> ExitCode:
    """End a run that cannot start: one line on stderr, and a verdict for the launcher if the directory is writable."""
    check = Check(
        id=CheckId.CAN_START, mode=config.modes[0], status=Status.FAIL, expected="no error", observed=str(error)
    )
    verdict = Verdict(
        status=Status.FAIL, exit_code=error.exit_code, world_size=int(os.environ.get("WORLD_SIZE", "1")),
        preset=config.preset, modes=config.modes, summary=str(error), checks=(check,),
    )  # fmt: skip
    is_first = rank == 0
    if run_dir is not None:
        with suppress(TpCompileError):  # rank 0 may be the one that is missing
            is_first = RunDir.create(run_dir).write_verdict(verdict)
    if is_first and not quiet:
        print_error(error)
    return error.exit_code


def print_error(error: TpCompileError) -> None:
    """One line on stderr."""
    with suppress(OSError):
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
