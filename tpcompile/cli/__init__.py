"""Command line -> exit code: the only place that prints an error and ends the process.

Commands import what they need inside the function, so `tpcompile --help` costs typer and loguru and nothing else.
"""

from __future__ import annotations

import sys
import traceback

import typer

from tpcompile.cli import compare, diagnose, faults, gate, presets, version
from tpcompile.errors import ExitCode, TpCompileError

app = typer.Typer(
    name="tpcompile",
    help="Prove that torch.compile gave every tensor-parallel rank the same one graph.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("gate")(gate.gate)
app.command("compare")(compare.compare)
app.command("diagnose")(diagnose.diagnose)
app.command(
    "faults", add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)(faults.faults)
app.command("presets")(presets.presets)
app.command("version")(version.version)


def main() -> None:
    """Entry point of `tpcompile`; ends the process with a code of `tpcompile.errors.ExitCode`."""
    try:
        app()
    except TpCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:
        traceback.print_exc()
        print("error: this is a bug in tpcompile; please report it with the lines above", file=sys.stderr)
        sys.exit(ExitCode.BUG)
