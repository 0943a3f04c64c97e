"""A command line -> exit code: the only place that prints an error and ends the process."""

from __future__ import annotations

import sys
import traceback

import typer

from tpcompile.errors import ExitCode, TpCompileError


def run(app: typer.Typer, name: str) -> None:
    """Run the command that the process was given; ends it with a code of `tpcompile.errors.ExitCode`."""
    try:
        app(prog_name=name)
    except TpCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:
        traceback.print_exc()
        print("error: this is a bug in tpcompile; please report it with the lines above", file=sys.stderr)
        sys.exit(ExitCode.BUG)
