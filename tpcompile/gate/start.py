"""Configuration and torchrun's environment -> a run directory of all ranks, a process group, and the run in them."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console

from tpcompile import logs
from tpcompile.config import JobConfig, RunConfig
from tpcompile.errors import DirectoryTakenError, ExitCode, PreflightError, TpCompileError
from tpcompile.evidence.rundir import RunDir
from tpcompile.fastpath.certificate import device_kind
from tpcompile.frames import with_room
from tpcompile.gate import faults
from tpcompile.gate.ending import Output, refuse
from tpcompile.gate.faults import NO_FAULT, Fault, FaultContext
from tpcompile.gate.fusion import FusionCheck
from tpcompile.gate.record import Evidence
from tpcompile.gate.running import Gate
from tpcompile.ranks.env import RankEnv, check_cpp_compiler, choose_device, process_group, rank_env
from tpcompile.ranks.run_dir import agreed_job, agreed_run_dir
from tpcompile.ranks.store import RankStore
from tpcompile.report import console as consoles
from tpcompile.report.show import Amount

_AFTER_WATCH_S = 60.0
_RUN_NUMBERS = itertools.count()


@with_room
def run(
    config: JobConfig,
    *,
    run_dir: Path | str | None = None,
    quiet: bool = False,
    amount: Amount = "all",
    console: Console | None = None,
) -> ExitCode:
    """Run the gate on this rank, under torchrun, and return the exit code; all ranks return the same.

    Writes records, verdict and reports to `run_dir` before it returns, by default a new directory under runs/; a
    directory that holds a run is refused. `quiet` leaves the terminal to the launcher; otherwise rank 0 prints
    `amount` of the report to `console`, by default stdout. When the arguments or the machine cannot be used, rank 0
    prints one line on stderr. May be called several times in a process, on all ranks alike; a run that some rank
    cannot finish ends the process, since a collective that waits for that rank cannot be interrupted.
    """
    prefix = f"tpcompile/gate/{next(_RUN_NUMBERS)}"  # the store still holds the keys of the runs before
    rank = int(os.environ.get("RANK", "0"))
    try:
        env = rank_env()
        config.check_tp(env.world_size)
        fault, context = _fault(config, env)
        device = _device(config, env, fault)
        fusion = FusionCheck.of(config, device)
        store = RankStore.connect(prefix, rank=env.rank, world_size=env.world_size)
        directory, job = _claim(run_dir, config, store), agreed_job(store)
    except DirectoryTakenError as error:
        return refuse(error, config, None, rank=rank, quiet=quiet)
    except TpCompileError as error:
        return refuse(error, config, run_dir, rank=rank, quiet=quiet)
    fault.phase("start", context)
    # A collective that times out raises on a rank that waits: the watch, which asks all ranks, must be first.
    limits = {"timeout_s": config.gate.phase_timeout_s + _AFTER_WATCH_S, "start_timeout_s": config.gate.store_timeout_s}
    with ExitStack() as stack:
        stack.enter_context(logs.kept(directory.logs, rank=env.rank))
        try:
            shares_gpu = config.device == "one_gpu"
            stack.enter_context(process_group(env, device, shares_gpu=shares_gpu, prefix=prefix, **limits))
        except TpCompileError as error:
            return refuse(error, config, directory.path, rank=rank, quiet=quiet)
        output = Output(quiet, amount, console or consoles.stdout())
        gate = Gate(Evidence(config, env, directory, fusion, job=job), prefix, output)
        stack.enter_context(gate.watched())
        try:
            return gate.run(device, fault, context)
        except PreflightError as error:  # the disk has become full
            return refuse(error, config, directory.path, rank=rank, quiet=quiet)


def _fault(config: JobConfig, env: RankEnv) -> tuple[Fault, FaultContext]:
    fault, target = NO_FAULT, env.world_size - 1
    if isinstance(config, RunConfig):
        fault = faults.find(config.fault)
        target = target if config.fault_rank is None else config.fault_rank
    return fault, FaultContext(rank=env.rank, world_size=env.world_size, target=target)


def _device(config: JobConfig, env: RankEnv, fault: Fault) -> torch.device:
    """The device of this rank; raises PreflightError where the run cannot be on it."""
    device = choose_device(config.device, env)
    if fault.needs_gpu and device.type != "cuda" and device_kind() != "interpreter":
        raise PreflightError(f"fault {fault.name!r} needs a GPU, this run is on {device.type}")
    check_cpp_compiler(config.compile.backend, device)
    return device


def _claim(run_dir: Path | str | None, config: JobConfig, store: RankStore) -> RunDir:
    """The run directory of all ranks; the first rank that asks checks that it holds no run, before any rank writes."""
    path = Path(run_dir) if run_dir else agreed_run_dir(store, f"{config.label}-tp{store.world_size}")
    if store.put_first("taken", RunDir(path).holds_run(), bool):
        raise DirectoryTakenError(path)
    return RunDir.create(path)
