"""`tpcompile gate`: run the gate under torchrun, end with its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def gate(
    nproc: Annotated[int | None, typer.Option("--nproc", help="Ranks; default: all GPUs, else 2.")] = None,
    mode: Annotated[Literal["A", "B", "C", "all"], typer.Option(help="How collectives are issued.")] = "C",
    preset: Annotated[str | None, typer.Option(help="See `tpcompile presets`; default: wan14b or cpu_smoke.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks in the stack.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Forward and backward.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float64.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any config key; repeatable.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Default: runs/<utc time>-<preset>-tp<N>.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: GPUs when there are any.")] = "auto",
    timeout_s: Annotated[float, typer.Option(min=1, help="Seconds until all ranks are killed, exit 124.")] = 3600.0,
    fault: Annotated[str, typer.Option(help="Known fault to inject, so that the gate fails.")] = "",
    fault_rank: Annotated[int | None, typer.Option(help="Rank that gets the fault; default: the last.")] = None,
) -> None:
    """Run the gate on N ranks of this machine; exit 0 only when every rank compiled the same one graph."""
    from rich.console import Console

    from tpcompile import launch, logs

    logs.setup(rank=0)
    request = launch.GateRequest(
        nproc=nproc,
        mode=mode,
        preset=preset,
        layers=layers,
        train=train,
        dtype=dtype,
        overrides=tuple(overrides or ()),
        run_dir=run_dir,
        device=device,
        timeout_s=timeout_s,
        fault=fault,
        fault_rank=fault_rank,
    )
    plan = launch.plan(request)
    print(f"{plan.nproc} ranks on {plan.device}, preset {plan.config.preset}, run directory {plan.run_dir}", flush=True)
    raise typer.Exit(launch.run(plan, Console()))
