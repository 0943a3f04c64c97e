"""GateRequest -> torchrun -> exit code: preflight, one process tree, and a verdict however that tree ends."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from loguru import logger
from rich.console import Console

from tpcompile import pods, srun
from tpcompile.choices import Device, phases_of
from tpcompile.config import JobConfig, RunConfig
from tpcompile.errors import ConfigError, ExitCode, PreflightError
from tpcompile.evidence.records import Check, CheckId, Status, Verdict
from tpcompile.evidence.rundir import RankStatus, RunDir, new_name
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.process_tree import Outcome, run_tree
from tpcompile.report import console as consoles
from tpcompile.report.progress import Progress
from tpcompile.report.publish import publish, write
from tpcompile.report.show import Amount, show
from tpcompile.report.torchrun_output import TorchrunLog
from tpcompile.request import GateRequest, RunRequest

NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
"""Variables that leave NVLink multicast off, in all that is timed."""
GPU_DIM = 1024
"""Model dim from which on a block is not run on CPU by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A request that passed the preflight: every default resolved."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    nproc: int
    device: Device
    config: JobConfig
    run_dir: Path
    timeout_s: float


def plan(request: GateRequest, environ: Mapping[str, str] = os.environ) -> Plan:
    """Check everything that can be checked before a process starts, and resolve the defaults.

    Raises ConfigError (preset, keys, tp) or PreflightError (GPUs, compiler, run directory).
    """
    _check_pod(request, environ)
    num_gpus = 0 if request.device == "cpu" else count_gpus(environ)
    if request.nproc is None and request.device == "auto" and num_gpus == 1:
        logger.warning("1 GPU: 2 ranks on CPU, as one rank has none to be compared with; --nproc 1 runs on the GPU")
        num_gpus = 0
    nproc = request.nproc if request.nproc is not None else num_gpus or 2
    device = chosen_device(request.device, nproc, num_gpus)
    resolved = request.config(device)
    check_size(resolved, asked=request.device)
    resolved.check_tp(nproc)
    _check_fault(request, nproc)
    _check_target(request.target)
    environ = pods.without_defaults(environ)
    if device == "cpu" and resolved.compile.backend == "inductor":
        environ["CXX"] = cxx_compiler(environ)  # Inductor by default takes g++ alone, on macOS clang++
    environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // nproc)))
    run_dir = request.run_dir or Path(new_name(f"{resolved.label}-tp{nproc}"))
    RunDir.create_new(run_dir).write_config(resolved.model_dump_json(indent=1))
    return Plan(
        command=tuple(torchrun(nproc, ["-m", "tpcompile.gate", str(run_dir)])),
        environ=environ,
        nproc=nproc,
        device=device,
        config=resolved,
        run_dir=run_dir,
        timeout_s=request.timeout_s,
    )


def _check_pod(request: GateRequest, environ: Mapping[str, str]) -> None:
    """Raise ConfigError in one pod of a job, unless ranks of this pod alone are asked for."""
    if request.nproc is None and pods.num_pods(environ) > 1:
        raise ConfigError(
            f"PET_NNODES={environ['PET_NNODES']}: this is one pod of a job; start the ranks of all pods with "
            "`torchrun -m tpcompile gate`, or those of this one alone with --nproc N"
        )


def _check_target(target: str | None) -> None:
    """Raise ConfigError where no module of that name is here, before ranks start and import torch."""
    if not target:
        return
    top = target.partition(":")[0].partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if here is None and top not in sys.builtin_module_names:
        raise ConfigError(
            f"--target {target}: there is no module {top} here, in {os.getcwd()} or where packages are installed"
        )


def is_rank(environ: Mapping[str, str]) -> bool:
    """True in a process that a launcher has started as one rank of a job."""
    variables = {**environ, **srun.torchrun_variables(environ)}
    return all(variables.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def become_rank(request: GateRequest, amount: Amount) -> NoReturn:
    """Go on in this process as one rank of the job, which imports torch; a target is found from the current folder."""
    flags = {field.name: getattr(request, field.name) for field in dataclasses.fields(RunRequest)}
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "tpcompile.gate.in_rank", json.dumps(flags, default=str), amount])


def run(plan: Plan, console: Console, *, amount: Amount = "all") -> int:
    """Run the plan, print and write its reports, return the exit code (`ExitCode`); no process is left running.

    The report goes to `console`; progress, and what the ranks write to stderr, to stderr. With `amount="json"`, what
    the ranks write to stdout goes there, too.
    """
    run_dir = RunDir(plan.run_dir)
    stderr = consoles.stderr()
    phases = phases_of(plan.config.modes)
    progress = Progress(run_dir, plan.nproc, stderr, phases=phases, is_quiet=amount == "last")
    with progress, TorchrunLog(run_dir.logs / "torchrun.log", progress.show) as log:
        stdout = sys.stderr if amount == "json" else None
        outcome = run_tree(
            plan.command,
            environ=plan.environ,
            timeout_s=plan.timeout_s,
            stdout=stdout,
            on_line=log.line,
            on_signal=log.mute,  # ranks that are interrupted while they import print a traceback each
        )
        is_cut_short = outcome.timed_out or outcome.signal
        is_reported = run_dir.read_statuses() or run_dir.read_verdict()
        if not is_reported and not is_cut_short:  # the verdict will not have what torchrun reports
            log.show_hidden()
        elif log.num_hidden and not outcome.signal and amount == "all":
            report = "torchrun's own report" if outcome.exit_code else "what torch warned of"
            progress.show(f"{report}, {log.num_hidden} lines: {log.path}")
    is_judged = run_dir.read_verdict() is not None
    verdict = _verdict(run_dir, plan, outcome)
    if outcome.signal and not is_judged and amount != "json":
        show(verdict, console, amount="last")  # nothing was found: one line
        write(verdict, run_dir, console, plan.environ)
    else:
        publish(verdict, run_dir, console, plan.environ, amount=amount)
    return verdict.exit_code


def torchrun(nproc: int, program: Sequence[str]) -> list[str]:
    """The command line of one single-node torchrun of a script, or of `-m` and a module, with its arguments."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return [*launcher, *program]


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that a process would see, by `nvidia-smi -L` and CUDA_VISIBLE_DEVICES; 0 without nvidia-smi."""
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        return 0
    with suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
        count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        return count if visible is None else min(count, _num_visible(visible))
    return 0


def cxx_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """C++ compiler for Inductor: $CXX, else g++, c++ or clang++. Raises PreflightError when there is none."""
    candidates, missing = ["g++", "c++", "clang++"], "no g++, c++ or clang++ on the PATH"
    named = environ.get("CXX")
    if named:
        candidates, missing = [named], f"CXX={named} is not on the PATH"
    for name in candidates:
        if shutil.which(name, path=environ.get("PATH")):
            return name
    raise PreflightError(f"no C++ compiler for Inductor on CPU: {missing}; install one or set CXX")


def verdict_without_one(
    statuses: Sequence[RankStatus], world_size: int, torchrun_exit_code: int, timed_out: bool
) -> Verdict:
    """The verdict when no rank wrote one: which rank ended in which phase, from the ranks' status files."""
    has_left = torchrun_exit_code == 0 and "running" in {status.state for status in statuses}
    ended = ("left the process with code 0 in",) if has_left else ()
    checks = _checks_of_ends(statuses, world_size, timed_out, *ended)
    if timed_out:
        code = ExitCode.TIMEOUT
        why = "no verdict yet" if statuses else "no rank had started"
    elif not statuses:
        code = ExitCode.BUG if torchrun_exit_code == 0 else ExitCode.ENVIRONMENT
        why = f"no rank reported; torchrun ended with code {torchrun_exit_code}"
    elif "unwritten" in {status.state for status in statuses}:
        code, why = ExitCode.ENVIRONMENT, "the gate ended without a verdict"
    elif has_left:  # os._exit of the target
        code, why = ExitCode.FAIL, "no verdict"
    elif torchrun_exit_code == 0 or "failed" in {status.state for status in statuses}:
        code, why = ExitCode.BUG, "the gate ended without a verdict"
    else:
        code, why = ExitCode.FAIL, f"torchrun ended with code {torchrun_exit_code}"
    failed = _failed(checks)
    if statuses and failed:
        why = ": ".join([why, failed[0].observed, *failed[0].details])
    return Verdict(status=Status.FAIL, exit_code=code, world_size=world_size, summary=why, checks=tuple(checks))


def _failed(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if check.status == Status.FAIL]


def _checks_of_ends(
    statuses: Sequence[RankStatus], world_size: int, timed_out: bool, ended: str = "died in"
) -> list[Check]:
    """One check per group of ranks that ended alike, the likeliest root cause first."""
    verbs = {
        "unwritten": "could not write its record after",
        "failed": "raised an exception in",
        "running": "never left" if timed_out else ended,
        "stopped": "received a termination signal in",
        "finished": "finished after",
    }
    checks = []
    missing = sorted(set(range(world_size)).difference(status.rank for status in statuses))
    if missing:
        checks.append(_ended(f"{named_ranks(missing)} never reported a phase", Status.FAIL, missing, ""))
    alike: dict[tuple[str, str, str], list[int]] = {}
    for state in verbs:
        for status in statuses:
            if status.state == state:
                alike.setdefault((state, status.phase or "start", status.error), []).append(status.rank)
    is_caused = bool(missing) or any(state in ("failed", "running", "unwritten") for state, _, _ in alike)
    for (state, phase, error), ranks in alike.items():
        is_consequence = is_caused and state in ("stopped", "finished")
        result = Status.INFO if is_consequence else Status.FAIL
        checks.append(_ended(f"{named_ranks(ranks)} {verbs[state]} phase {phase}", result, ranks, error))
    return sorted(checks, key=lambda check: (check.status != Status.FAIL, not check.details))


def _ended(observed: str, status: Status, ranks: Sequence[int], error: str) -> Check:
    details = (error,) if error else ()
    return Check(
        name="every rank ends with a verdict",
        status=status,
        expected="finished",
        observed=observed,
        details=details,
        ranks=tuple(ranks),
    )


def _verdict(run_dir: RunDir, plan: Plan, outcome: Outcome) -> Verdict:
    try:
        verdict = run_dir.read_verdict()
    except (ConfigError, json.JSONDecodeError) as error:
        raise ConfigError(f"{run_dir.path}: the verdict cannot be read: {error}") from None
    if verdict is None:
        run_dir.check_writable()  # on a full disk no rank can say why it ended
        statuses = run_dir.read_statuses()
        cut_short = outcome.timed_out or outcome.signal != 0
        verdict = verdict_without_one(statuses, plan.nproc, outcome.exit_code, cut_short)
        facts = {"preset": plan.config.preset, "modes": plan.config.modes}
        verdict = _cut_short(verdict.model_copy(update=facts), plan, outcome)
        run_dir.write_verdict(verdict)
        return verdict
    written = verdict
    if verdict.exit_code == 0 and outcome.exit_code != 0:
        verdict = _unclean(verdict, outcome)
    if not (outcome.timed_out or outcome.signal):
        verdict = _with_dead_ranks(verdict, run_dir.read_statuses())
    verdict = _cut_short(verdict, plan, outcome)
    if verdict != written:
        run_dir.replace_verdict(verdict)
    return verdict


def _with_dead_ranks(verdict: Verdict, statuses: Sequence[RankStatus]) -> Verdict:
    """A verdict that knows only that a rank is missing, or the job stopped, completed by what these ranks left."""
    is_unwritten = any(status.state == "unwritten" for status in statuses)
    if not is_unwritten and CheckId.ALIVE not in {check.id for check in _failed(verdict.checks)}:
        return verdict
    dead = _failed(_checks_of_ends(statuses, verdict.world_size, False))
    if not dead:
        return verdict
    texts = [": ".join([check.observed, *check.details]) for check in dead]
    summary = "; ".join([*texts, verdict.summary])
    code = ExitCode.ENVIRONMENT if is_unwritten else ExitCode.FAIL
    update = {"exit_code": code, "summary": summary, "checks": (*dead, *verdict.checks)}
    return verdict.model_copy(update=update)


def _unclean(verdict: Verdict, outcome: Outcome) -> Verdict:
    """A passed verdict whose ranks then hung or crashed on the way out is not a pass."""
    observed = f"torchrun ended with code {outcome.exit_code}"
    name = "ranks exit cleanly after the verdict"
    check = Check(name=name, status=Status.FAIL, expected="code 0", observed=observed)
    summary = f"every check passed, then the ranks did not exit cleanly: {observed}"
    update = {"status": Status.FAIL, "exit_code": ExitCode.BUG, "summary": summary}
    return verdict.model_copy(update=update | {"checks": (*verdict.checks, check)})


def _cut_short(verdict: Verdict, plan: Plan, outcome: Outcome) -> Verdict:
    """The verdict of a run that this launcher ended: always failed, with the reason first."""
    if outcome.timed_out:
        code, why = ExitCode.TIMEOUT, f"stopped after {plan.timeout_s:g} s (--timeout-s)"
    elif outcome.signal:
        code, why = ExitCode(128 + outcome.signal), f"stopped by {signal.Signals(outcome.signal).name}"
    else:
        return verdict
    return verdict.model_copy(update={"status": Status.FAIL, "exit_code": code, "summary": f"{why}: {verdict.summary}"})


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chosen_device(asked: Device, nproc: int, num_gpus: int, *, otherwise: Device = "one_gpu") -> Device:
    """`auto` resolved. Raises ConfigError without a rank, PreflightError without the GPUs that were asked for.

    `otherwise` is the device to advise where there are fewer GPUs than ranks.
    """
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: at least one rank is needed")
    if asked == "auto":
        asked = "cuda" if num_gpus > 0 else "cpu"
    if asked == "cpu":
        return "cpu"
    if num_gpus == 0:
        raise PreflightError(f"--device {asked}: no GPU here (nvidia-smi -L, CUDA_VISIBLE_DEVICES); use --device cpu")
    if nproc > num_gpus and asked == "cuda":
        raise PreflightError(f"{nproc} ranks but {num_gpus} GPUs; use --nproc {num_gpus} or --device {otherwise}")
    return asked


def check_size(config: JobConfig, *, asked: Device) -> None:
    """Refuse a block sized for GPUs where there is none, unless CPU was asked for: it would run for hours."""
    is_by_default = asked == "auto" and config.device == "cpu"
    if not is_by_default or not isinstance(config, RunConfig):
        return
    if config.block.dim >= GPU_DIM:
        size = f"preset {config.preset} (dim {config.block.dim}) is sized for GPUs"
        raise PreflightError(
            f"{size}, and there is no GPU here; use --preset cpu_smoke, or --device cpu for a long run"
        )


def _check_fault(request: GateRequest, nproc: int) -> None:
    if request.fault_rank is not None and not 0 <= request.fault_rank < nproc:
        raise ConfigError(f"--fault-rank {request.fault_rank}: the job has ranks 0 to {nproc - 1}")
    if request.fault:
        # A process of its own: what is injected imports torch.
        command = [sys.executable, "-m", "tpcompile.gate.faults", request.fault]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == ExitCode.USAGE:
            raise ConfigError(found.stderr.splitlines()[-1].removeprefix("error: "))


def _num_visible(visible: str) -> int:
    """Entries of CUDA_VISIBLE_DEVICES before the first invalid one, as CUDA reads it."""
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        if not (name.isdigit() or name.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count
