"""`tpcompile gate`: run the gate under torchrun, end with its verdict."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tpcompile.request import GateRequest, flags_of


def gate(**options: Any) -> None:
    """Run the gate on N ranks of this machine; exit 0 only when every rank compiled the same one graph.

    In a job that torchrun or srun has started (RANK, WORLD_SIZE and MASTER_ADDR are set) and without --nproc, this
    process is one of the ranks.
    """
    from rich.console import Console

    from tpcompile import launch, logs

    request = GateRequest(**options)
    if request.nproc is None and launch.is_rank(os.environ):
        launch.become_rank(request)
    logs.setup(rank=0)
    plan = launch.plan(request)
    print(f"{plan.nproc} ranks on {plan.device}, {plan.config.title}, run directory {plan.run_dir}", flush=True)
    raise typer.Exit(launch.run(plan, Console()))


def _parameters() -> Iterator[inspect.Parameter]:
    """The fields of a request, as typer reads flags off a signature."""
    for field, kind, flag in flags_of(GateRequest):
        option = typer.Option(flag.spelling, help=flag.help, metavar=flag.metavar, min=flag.minimum)
        value = kind if field.default is not None else kind | None
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(field.name, keyword, default=field.default, annotation=Annotated[value, option])


gate.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
