"""`python -m tpcompile.typecheck TARGET`: the body of `tpcompile typecheck`, in a process that may import torch."""

from __future__ import annotations

from typing import Annotated

import typer

from tpcompile.cli import ending
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.typecheck.report import Report
from tpcompile.typecheck.targets import check_target

app = ending.new_app()


@app.command()
def typecheck(
    target: Annotated[str, typer.Argument(help="package.module:build, as for `tpcompile gate --target`.")],
    nproc: Annotated[int, typer.Option(min=2, help="Number of ranks; none is started.")] = 4,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For `build`.")] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameter", metavar="PATTERN=TYPE", help="Type of parameters, such as '*.wo.weight=V(1)'."),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="TYPE", help="Type of an input tensor, once for each of them, in order."),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", metavar="TYPE", help="Type that the caller expects of the outputs.")
    ] = "I",
    train: Annotated[bool, typer.Option("--train/--no-train", help="Judge gradients, too.")] = True,
    numbers: Annotated[
        bool, typer.Option("--numbers/--no-numbers", help="Run all ranks, and compare them with one device.")
    ] = True,
    meta: Annotated[bool, typer.Option("--meta", help="`ctx.device` is meta: nothing is computed or stored.")] = False,
) -> None:
    """Follow what is replicated, sharded and partial through a module, and report the ops that mistake one for another.

    One process plays the first and the last of the ranks, in eager; then all ranks run on small gloo processes beside
    one device, and their outputs and gradients are compared. Types: I and R are equal on all ranks, with equal
    gradients or with gradients that must be summed; V(DIM) is a shard; P is partial. Exits with 1 for a finding, with 5
    where no op ran, and with 6 where nothing was found, not every op was judged, and the numbers were not compared.
    """
    report = check_target(
        target,
        settings or (),
        nproc=nproc,
        device="meta" if meta else "cpu",
        input_types=inputs,
        output_type=output,
        parameter_types=dict(map(_pair, parameters or ())),
        train=train,
        numbers=numbers,
    )
    print(report)
    raise typer.Exit(_exit_code(report))


def _pair(text: str) -> tuple[str, str]:
    pattern, _, type_ = text.partition("=")
    if not pattern or not type_:
        raise ConfigError(f"--parameter {text!r}: write PATTERN=TYPE, such as '*.wo.weight=V(1)'")
    return pattern, type_


def _exit_code(report: Report) -> ExitCode:
    if report.violations:
        return ExitCode.FAIL
    if report.num_ops == 0:
        return ExitCode.NOTHING_COMPILED
    return ExitCode.PASS if report.is_complete else ExitCode.INCOMPLETE


if __name__ == "__main__":
    ending.run(app, "tpcompile typecheck")
