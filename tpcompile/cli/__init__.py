"""The commands of `tpcompile`.

Commands import what they need inside the function, so `tpcompile --help` costs typer and loguru and nothing else.
"""

from __future__ import annotations

import typer

from tpcompile.cli import (
    bench,
    compare,
    diagnose,
    doctor,
    ending,
    explain,
    gate,
    passed_on,
    presets,
    run,
    version,
)

app = typer.Typer(
    name="tpcompile",
    help="Prove that torch.compile gave every tensor-parallel rank the same one graph.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback()(version.option)
_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Settings of commands whose arguments go to a process that imports torch."""
app.command("run")(run.run)
app.command("bench", add_help_option=False, context_settings=_PASSED_ON)(bench.bench)
app.command("certify", add_help_option=False, context_settings=_PASSED_ON)(passed_on.certify)
app.command("gate")(gate.gate)
app.command("compare")(compare.compare)
app.command("diagnose")(diagnose.diagnose)
app.command("doctor", short_help="Look at this machine: what is missing, what to do.")(doctor.doctor)
app.command("explain", short_help="Explain a cause that a verdict names.")(explain.explain)
app.command("fusion", add_help_option=False, context_settings=_PASSED_ON)(passed_on.fusion)
app.command("typecheck", add_help_option=False, context_settings=_PASSED_ON)(passed_on.typecheck)
app.command("verify-win", add_help_option=False, context_settings=_PASSED_ON)(passed_on.verify_win)
app.command("presets")(presets.presets)
app.command("version")(version.version)


def main() -> None:
    """Entry point of `tpcompile`."""
    ending.run(app, "tpcompile")
