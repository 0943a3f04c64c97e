"""`tpcompile gate`: run the gate under torchrun, end with its verdict."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tpcompile.request import GateRequest, flags_of


def gate(**options: Any) -> None:
    """Run the gate on N ranks of this machine; exit 0 only when every rank compiled the same one graph."""
    from rich.console import Console

    from tpcompile import launch, logs

    logs.setup(rank=0)
    plan = launch.plan(GateRequest(**options))
    print(f"{plan.nproc} ranks on {plan.device}, preset {plan.config.preset}, run directory {plan.run_dir}", flush=True)
    raise typer.Exit(launch.run(plan, Console()))


def _parameters() -> Iterator[inspect.Parameter]:
    """The fields of a request, as typer reads flags off a signature."""
    for field, kind, flag in flags_of(GateRequest):
        option = typer.Option(flag.spelling, help=flag.help, metavar=flag.metavar, min=flag.minimum)
        value = kind if field.default is not None else kind | None
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(field.name, keyword, default=field.default, annotation=Annotated[value, option])


gate.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
