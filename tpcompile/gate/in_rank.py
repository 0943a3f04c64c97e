"""Flags of the gate, in a rank that torchrun has started -> exit code of this rank."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import cast

import torch
from rich.console import Console

from tpcompile import logs, pods, srun
from tpcompile.choices import Device
from tpcompile.errors import TpCompileError
from tpcompile.gate.start import run
from tpcompile.ranks.env import rank_env
from tpcompile.ranks.store_process import served_store
from tpcompile.report.show import Amount
from tpcompile.request import RunRequest, add_flags


def main(description: str) -> int:
    """Run the gate with the flags of this process, a script under torchrun."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, RunRequest)
    parser.add_argument("--quiet-report", action="store_true", help="Write the verdict, print nothing.")
    options = vars(parser.parse_args())
    quiet = options.pop("quiet_report")
    return run_in_rank(RunRequest(**options), quiet=quiet)


def run_in_rank(request: RunRequest, *, quiet: bool = False, amount: Amount = "all") -> int:
    """Run the gate on this rank; all ranks must call it with the same request, and return the same code.

    Rank 0 prints `amount` of the report unless all ranks are `quiet`; with `amount="json"`, stdout has nothing else.

    For a configuration that cannot be used, rank 0 prints one line on stderr. When the ranks were started by srun, or
    by a script that sets torchrun's variables, rank 0 also serves the job's store.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a target is imported from the current directory, as with `python -m`
    os.environ.update(srun.torchrun_variables(os.environ))
    rank = int(os.environ.get("RANK", "0"))
    logs.setup(rank=rank)
    try:
        os.environ.update(pods.torchrun_variables(os.environ))
        config = request.config(_device(request.device))
        with served_store(rank_env(), timeout_s=config.gate.store_timeout_s):
            console = _reserved_stdout() if amount == "json" else None
            return run(config, run_dir=request.run_dir, quiet=quiet, amount=amount, console=console)
    except TpCompileError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _reserved_stdout() -> Console:
    """A console on stdout; everything else that this process prints goes to stderr from now on."""
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stdout.flush()
    os.dup2(2, 1)
    return Console(file=stdout, force_terminal=False)


def _device(asked: Device) -> Device:
    """The device for `auto`: "cuda" when this machine has a GPU for each of its ranks."""
    if asked != "auto":
        return asked
    has_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "cuda" if has_gpus else "cpu"


if __name__ == "__main__":
    flags, amount = sys.argv[1:]
    sys.exit(run_in_rank(RunRequest(**json.loads(flags)), amount=cast(Amount, amount)))
