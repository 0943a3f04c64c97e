"""`tpcompile tune`: measure the sums of this machine by size ahead of time, under torchrun."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from tpcompile.choices import SUMMED_RANKS
from tpcompile.cli.outputs import OtherJson
from tpcompile.cli.passed_on import require_torch
from tpcompile.errors import ConfigError, ExitCode, PreflightError

_MOST_S = 300.0


def tune(
    nproc: Annotated[int, typer.Option(help="GPUs that sum: 2, 4 or 8.")] = 2,
    json_file: OtherJson = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="TABLE", help="Put the cell into this table, too; made if it is not there."),
    ] = None,
    anew: Annotated[bool, typer.Option(help="Measure what the machine has, or tpcompile ships, as well.")] = False,
) -> None:
    """Example: tpcompile tune --nproc 2

    Measure sums over GPUs by size and algorithm, and keep which is fastest for `all_reduce="by_size"`.
    """
    if nproc not in SUMMED_RANKS:
        raise ConfigError(f"--nproc {nproc}; choose from {', '.join(map(str, SUMMED_RANKS))}")
    require_torch()
    from tpcompile import launch
    from tpcompile.process_tree import run_tree

    num_gpus = launch.count_gpus()
    if num_gpus < nproc:
        raise PreflightError(f"--nproc {nproc}, and {num_gpus} GPUs are here (nvidia-smi -L, CUDA_VISIBLE_DEVICES)")
    asked = {"json": json_file, "write": write, "anew": anew}
    outcome = run_tree(
        launch.torchrun(nproc, ["-m", "tpcompile.by_size", json.dumps(asked, default=str)]),
        environ={**os.environ, **launch.NO_MULTICAST},
        timeout_s=_MOST_S,
    )
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)
    raise typer.Exit(ExitCode.TIMEOUT if outcome.timed_out else outcome.exit_code)
