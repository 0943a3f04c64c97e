"""`tpcompile bench ARGUMENTS` -> `python -m tpcompile.bench ARGUMENTS`, which starts ranks; none is left running."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TextIO

import typer

from tpcompile.cli.passed_on import require_torch
from tpcompile.errors import ExitCode

_MOST_S = 6 * 3600.0
"""Each answer of a rank has a limit of its own, `--timeout-s`; this one is for all of them."""


def bench(context: typer.Context) -> None:
    """Time compiled tensor-parallel programs, ours and others', side by side; `--help` says how."""
    require_torch()
    raise typer.Exit(run_bench(context.args))


def run_bench(arguments: Sequence[str], *, stdout: TextIO | None = None) -> int:
    """The exit code of a run with these arguments."""
    from tpcompile.process_tree import run_tree

    command = [sys.executable, "-m", "tpcompile.bench", *arguments]
    is_stopped = threading.Event()

    def show(line: str) -> None:
        """What ranks print while they are stopped is a traceback each."""
        if not is_stopped.is_set():
            print(line, file=sys.stderr, flush=True)

    outcome = run_tree(
        command, environ=os.environ, timeout_s=_MOST_S, stdout=stdout, on_line=show, on_signal=is_stopped.set
    )
    if outcome.signal:
        print(f"stopped by {signal.Signals(outcome.signal).name}", file=sys.stderr)
        return 128 + outcome.signal
    return ExitCode.TIMEOUT if outcome.timed_out else outcome.exit_code
