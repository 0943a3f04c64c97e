"""`tpcompile gate`: run the gate under torchrun, end with its verdict."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from tpcompile.request import Declared, GateRequest, flags_of


def gate(**options: Any) -> None:
    """Run the gate on N ranks of this machine; exit 0 only when every rank compiled the same one graph."""
    from rich.console import Console

    from tpcompile import launch, logs

    logs.setup(rank=0)
    plan = launch.plan(GateRequest(**options))
    print(f"{plan.nproc} ranks on {plan.device}, preset {plan.config.preset}, run directory {plan.run_dir}", flush=True)
    raise typer.Exit(launch.run(plan, Console()))


def _parameter(declared: Declared) -> inspect.Parameter:
    """A flag of the request, as typer reads it off a signature."""
    flag = declared.flag
    option = typer.Option(declared.spelling, help=flag.help, metavar=flag.metavar, min=flag.minimum)
    kind = declared.kind if declared.default is not None else declared.kind | None
    return inspect.Parameter(
        declared.field, inspect.Parameter.KEYWORD_ONLY, default=declared.default, annotation=Annotated[kind, option]
    )


gate.__signature__ = inspect.Signature([_parameter(flag) for flag in flags_of(GateRequest)])  # type: ignore[attr-defined]
