"""The commands of `tpcompile`.

Commands import what they need inside the function, so `tpcompile --help` costs typer and loguru and nothing else.
"""

from __future__ import annotations

import typer

from tpcompile.cli import (
    bench,
    compare,
    diagnose,
    docs,
    doctor,
    ending,
    explain,
    gate,
    passed_on,
    presets,
    report,
    run,
    tune,
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
"""Settings of commands whose arguments, `--help` among them, go to a process that imports torch."""
_COMMANDS = (
    ("run", run.run, "Run a job without editing it; a verdict at the end."),
    ("diagnose", diagnose.diagnose, "Compare ranks offline, from TORCH_TRACE logs."),
    ("gate", gate.gate, "CI: one graph and equal guards on all ranks, or red."),
    ("dryrun", passed_on.dryrun, "Trace 1,024 ranks on this machine, without a GPU."),
    ("explain", explain.explain, "Explain a cause that a verdict names."),
    ("report", report.report, "Make one HTML page of a run."),
    ("compare", compare.compare, "Compare the ranks of a finished run again."),
    ("doctor", doctor.doctor, "Look at this machine: what is missing, what to do."),
    ("typecheck", passed_on.typecheck, "Follow partial and sharded values in a module."),
    ("fusion", passed_on.fusion, "Show kernels, what did not fuse and why."),
    ("verify-win", passed_on.verify_win, "Measure eager and each mode of torch.compile."),
    ("certify", passed_on.certify, "Prove a fused kernel on the shards of TP ranks."),
    ("bench", bench.bench, "Time compiled tensor-parallel programs."),
    ("tune", tune.tune, "Measure sums over GPUs by size, ahead of time."),
    ("docs", docs.docs, "Print where the pages of the documentation are."),
    ("presets", presets.presets, "List the presets with their sizes."),
    ("version", version.version, "Print the versions to put into a bug report."),
)
"""Commands in the order in which users need them; the line of `--help` is short enough not to be cut."""
for _name, _command, _help in _COMMANDS:
    _is_passed_on = _command.__module__ == passed_on.__name__ or _command is bench.bench
    app.command(
        _name,
        short_help=_help,
        add_help_option=not _is_passed_on,
        context_settings=_PASSED_ON if _is_passed_on else None,
    )(_command)


def main() -> None:
    """Entry point of `tpcompile`."""
    ending.run(app, "tpcompile")
