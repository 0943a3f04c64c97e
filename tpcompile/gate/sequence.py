"""Configuration and torchrun's environment -> modes in order -> verdict on disk -> exit code of this rank."""

from __future__ import annotations

import itertools
import os
import platform
import sys
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loguru import logger
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpcompile import logs
from tpcompile.choices import TARGET
from tpcompile.config import JobConfig, RunConfig, TargetConfig
from tpcompile.errors import DirectoryTakenError, ExitCode, PreflightError, TpCompileError
from tpcompile.evidence.records import Check, CheckId, RankRecord, Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.fastpath.certificate import device_kind
from tpcompile.frames import with_room
from tpcompile.gate import faults
from tpcompile.gate.collective_agreement import Agreement, is_agreeing
from tpcompile.gate.failure import failure_check
from tpcompile.gate.faults import NO_FAULT, Fault, FaultContext
from tpcompile.gate.fusion import FusionCheck
from tpcompile.gate.last_state import LastState, forget_dead
from tpcompile.gate.measurements import GateDigest, GateFacts
from tpcompile.gate.modes import MODES, Run
from tpcompile.gate.phases import Phases
from tpcompile.gate.reference import StackReference, free
from tpcompile.gate.refusal import print_error, refuse
from tpcompile.gate.replay import gate_rules
from tpcompile.gate.status import StatusBoard
from tpcompile.gate.target import BUILD, declared
from tpcompile.gate.target import run as run_target
from tpcompile.gate.watch import Watch
from tpcompile.ranks.domain import Domain
from tpcompile.ranks.env import RankEnv, check_cpp_compiler, choose_device, process_group, rank_env
from tpcompile.ranks.exchange import Exchange
from tpcompile.ranks.mesh import mesh_roles
from tpcompile.ranks.recorded import record_side
from tpcompile.ranks.run_dir import agreed_run_dir
from tpcompile.ranks.store import RankStore
from tpcompile.recording import CaptureSession
from tpcompile.report import console as consoles
from tpcompile.report.publish import publish
from tpcompile.report.show import Amount
from tpcompile.target import TargetContext, TargetError, find, target_of

_LAST_WORDS_TIMEOUT_S = 8.0
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
        fault, faulty_rank = _fault(config)
        device = choose_device(config.device, env)
        if fault.needs_gpu and device.type != "cuda" and device_kind() != "interpreter":
            raise PreflightError(f"fault {fault.name!r} needs a GPU, this run is on {device.type}")
        check_cpp_compiler(config.compile.backend, device)
        fusion = FusionCheck.of(config, device)
        directory = _claim(run_dir, config, RankStore.connect(prefix, rank=env.rank, world_size=env.world_size))
    except DirectoryTakenError as error:
        return refuse(error, config, None, rank=rank, quiet=quiet)
    except TpCompileError as error:
        return refuse(error, config, run_dir, rank=rank, quiet=quiet)
    target = env.world_size - 1 if faulty_rank is None else faulty_rank
    context = FaultContext(rank=env.rank, world_size=env.world_size, target=target)
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
        output = _Output(quiet, amount, console or consoles.stdout())
        gate = _Gate(config, env, directory, fusion, prefix=prefix, output=output)
        gate.last_state.open(gate.store)
        stack.callback(gate.last_state.close)
        stack.enter_context(gate.watch)
        try:
            return gate.run(device, fault, context)
        except PreflightError as error:  # the disk has become full
            return refuse(error, config, directory.path, rank=rank, quiet=quiet)


def _fault(config: JobConfig) -> tuple[Fault, int | None]:
    """The fault to inject and its rank; only the gate's own block has faults."""
    return (faults.find(config.fault), config.fault_rank) if isinstance(config, RunConfig) else (NO_FAULT, None)


def _claim(run_dir: Path | str | None, config: JobConfig, store: RankStore) -> RunDir:
    """The run directory of all ranks; the first rank that asks checks that it holds no run, before any rank writes."""
    path = Path(run_dir) if run_dir else agreed_run_dir(store, f"{config.label}-tp{store.world_size}")
    if store.put_first("taken", RunDir(path).holds_run(), bool):
        raise DirectoryTakenError(path)
    return RunDir.create(path)


class _Output(NamedTuple):
    """What this rank prints, and where."""

    quiet: bool
    """Print nothing; the launcher prints the report."""
    amount: Amount
    console: Console


class _Gate:
    """One rank's run."""

    def __init__(
        self, config: JobConfig, env: RankEnv, directory: RunDir, fusion: FusionCheck, *, prefix: str, output: _Output
    ) -> None:  # fmt: skip
        self.config, self.env, self.directory, self.output = config, env, directory, output
        self.fusion = fusion
        place = {"rank": env.rank, "world_size": env.world_size}
        self.store = RankStore.connect(prefix, **place)
        self.board = StatusBoard(directory, self.store, prints_phases=output.amount == "all")
        self.watch_store = RankStore.connect(prefix, **place)
        self.others = StatusBoard(directory, self.watch_store)
        self.last_state = LastState(env.rank)
        self.watch = Watch(
            self.watch_store, self.last_words, mode=config.modes[-1], died=self.others.died, stuck=self.stuck
        )
        self.agreement = Agreement(RankStore.connect(prefix, **place), config, self.board, self.watch.end)
        self.session: CaptureSession | None = None
        self.phases: Phases | None = None
        self.domain: Domain | None = None
        """The ranks that must agree with this one; None is all of them."""

    def run(self, device: torch.device, fault: Fault, context: FaultContext) -> ExitCode:
        """All modes, then the exchange; any failure ends in a verdict."""
        self.board.enter("start")
        try:
            self.write_config(device)
        except PreflightError as error:
            self.watch.alarm(self.failure(error))  # the others must not wait for this rank
            self.watch.stop()
            return self.unwritten(error, self.store)
        try:
            with ExitStack() as stack:
                # The block, the roles and the declared collectives use the group of this mesh. It is the default
                # group, except for CPU ranks of a machine with GPUs: there torch makes a second group.
                mesh = init_device_mesh(device.type, (self.env.world_size,), mesh_dim_names=("tp",))
                self.session = stack.enter_context(self.new_session(mesh, fault, context))
                if isinstance(self.config, TargetConfig):
                    self.run_target(self.config, device, mesh, self.session)
                elif isinstance(self.config, RunConfig):
                    self.run_block(self.config, device, mesh, self.session, fault, context)
        except TargetError as error:
            self.watch.stop()
            return refuse(error, self.config, self.directory.path, rank=self.env.rank, quiet=self.output.quiet)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # any failure of any rank, sys.exit too, must end in a verdict on all of them
            self.watch.end(self.failure(error))
        return self.finish()

    def run_block(
        self, config: RunConfig, device: torch.device, mesh: DeviceMesh, session: CaptureSession,
        fault: Fault, context: FaultContext,
    ) -> None:  # fmt: skip
        """The modes of the gate's own block, in order."""
        reference = StackReference(config.block, seed=config.seed, device=device, train=config.train)
        self.phases = run = Run(
            config=config, device=device, session=session, group=mesh.get_group("tp"), reference=reference,
            fault=fault, context=context, begin=self.begin_phase, arrive=self.arrive, any_rank=self.any_rank,
            begin_call=self.begin_call,
        )  # fmt: skip
        for mode in config.modes:
            session.reset_compiler()
            self.agreement.mode = mode
            MODES[mode](run)
            if mode != config.modes[-1] or device.type == "cuda":
                free(device)

    def run_target(self, config: TargetConfig, device: torch.device, mesh: DeviceMesh, session: CaptureSession) -> None:
        """Build the user's program while the watch runs, then run it phase by phase."""
        self.begin_phase(BUILD, f"build {config.target}")
        self.arrive(BUILD)  # a rank that raises at once must find the others able to report
        session.reset_compiler()  # this process may have run the gate before
        rank, world_size = self.env.rank, self.env.world_size
        context = TargetContext(rank=rank, world_size=world_size, device=device, mesh=mesh, settings=config.settings)
        target = target_of(config, find(config)(context))
        session.read_environment()
        config, domain = declared(config, target, mesh)
        self.config, self.domain = config, domain
        session.know_groups(domain.roles or {})
        self.write_config(device)
        self.agreement.members, self.agreement.mode = domain.members, TARGET
        self.phases = Phases(
            config=config, device=device, session=session,
            begin=self.begin_phase, arrive=self.arrive, any_rank=self.any_rank,
            begin_call=self.begin_call,
        )  # fmt: skip
        run_target(self.phases, target, tp_size=len(domain.members))

    def write_config(self, device: torch.device) -> None:
        """On rank 0, write `config.json` and `run.json`."""
        if self.env.rank == 0:
            self.directory.write_config(self.config.model_dump_json(indent=1))
            self.directory.write_run(self.run_facts(device))

    def new_session(self, mesh: DeviceMesh, fault: Fault, context: FaultContext) -> CaptureSession:
        """A capture session that knows the mesh and compares every compile before its code runs."""
        return CaptureSession(
            groups=mesh_roles(mesh),
            on_compile_start=partial(self.compile_starts, fault, context),
            on_compile=self.agreement.on_compile,
            records_fusion=self.config.compile.backend == "inductor",
        )

    def compile_starts(self, fault: Fault, context: FaultContext, compile_id: str) -> None:
        """Publish the compile id, so that a rank that dies or hangs in it is reported with it."""
        self.board.doing(f"compiling {compile_id}")
        fault.phase("compiling", context)

    def begin_phase(self, name: str, doing: str) -> None:
        """Publish that a phase begins, and set its deadline."""
        self.last_state.finished = self.board.phase
        self.board.enter(name, doing=doing)
        self.watch.deadline(name, self.config.gate.phase_timeout_s)

    def arrive(self, name: str) -> None:
        """Wait for all ranks at this phase, before any of them issues a collective; a missing rank ends the run."""
        missing = self.store.wait_for_ranks(f"at/{name}", timeout_s=self.config.gate.store_timeout_s)
        if missing:
            self.watch.end(self.agreement.missing(name, missing))
        self.last_state.finished = ""

    def begin_call(self) -> None:
        """Publish what this rank has issued before a steady call, in case it aborts in one."""
        self.last_state.begin_call(self.board.phase, self.store)

    def stuck(self) -> Check | None:
        """The failed check of a collective that does not end; while a target is built, a rank may load for long."""
        if self.board.phase in ("start", BUILD):
            return None
        found = self.last_state.waits_too_long(self.config.gate.store_timeout_s, self.config.modes[-1])
        return None if found is None or is_agreeing(self.watch_store) else found

    def any_rank(self, question: str, answer: bool) -> bool:
        """True when any rank answers True, on all ranks: they must take one branch before a collective."""
        self.store.put(f"{question}/{self.env.rank}", answer)
        keys = {rank: f"{question}/{rank}" for rank in range(self.env.world_size)}
        found, late = self.store.gather(keys, bool, timeout_s=self.config.gate.store_timeout_s)
        if late:
            self.watch.end(self.agreement.missing(question, late))
        return any(found.values())

    def run_facts(self, device: torch.device) -> dict[str, str]:
        """Contents of `run.json`, the only file that names a time and a machine."""
        return {
            "command": " ".join(sys.argv),
            "started": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "host": platform.node(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "config_sha256": self.config.sha256,
        }

    def written_record(self) -> RankRecord:
        """All evidence of this rank so far, which is in the run directory then. Raises PreflightError if it cannot."""
        assert self.session is not None, "no session yet"
        record = self.record(self.session)
        self.directory.write_record(record)
        self.fusion.keep(self.session, self.directory, rank=self.env.rank)
        return record

    def record(self, session: CaptureSession) -> RankRecord:
        """All evidence of this rank so far."""
        place: dict[str, Any] = {}
        if self.domain is not None:
            members = len(self.domain.members)
            place = {"domain": self.domain.name, "coordinate": self.domain.coordinate, "tp_size": members}
        facts = self.phases.facts if self.phases else GateFacts()
        facts = facts.changed(fusion=self.fusion.outcome(session))
        return session.record(
            rank=self.env.rank,
            world_size=self.env.world_size,
            tp_aware=self.config.gate.tp_aware_ops,
            facts=facts.model_dump(mode="json"),
            **place,
        )

    def finish(self) -> ExitCode:
        """Exchange digests, publish the verdict and return the exit code."""
        self.last_state.finished = self.board.phase
        self.board.enter("verdict", doing="compare ranks")
        self.watch.deadline("verdict", 4 * self.config.gate.store_timeout_s)
        self.arrive("verdict")
        try:
            record = self.written_record()
        except PreflightError as error:
            self.watch.stop()
            return self.unwritten(error, self.store)
        exchange = self.exchange(self.store, timeout_s=self.config.gate.store_timeout_s)
        verdict = exchange.verdict(record_side(record, gate_rules(self.config), kind=GateDigest))
        self.watch.stop()
        self.board.end("finished")
        code = self.publish(verdict, judge=self.env.rank == 0)
        if self.env.rank == 0 and self.session is not None and code == ExitCode.PASS:
            self.fusion.tighten(self.session)
        return code

    def last_words(self, check: Check) -> ExitCode:
        """On the watch's thread: write the record so far, judge with the failed check, return the exit code."""
        self.board.end("stopped" if check.id == CheckId.ALIVE else "failed", error=check.observed)
        if self.session is None:
            return ExitCode.FAIL
        problems = self.last_state.explained(check, self.watch_store, self.others)
        self.last_state.close()
        try:
            record = self.written_record()
        except PreflightError as error:
            return self.unwritten(error, self.watch_store, after=check.observed)
        exchange = self.exchange(self.watch_store, timeout_s=_LAST_WORDS_TIMEOUT_S)
        side = record_side(record, gate_rules(self.config), problems=problems, kind=GateDigest)
        try:
            verdict = exchange.verdict(side)
        except RuntimeError:  # the store does not respond: judge with this rank's digest alone
            verdict = side.judge(
                {self.env.rank: side.own}, self.last_statuses(), lambda _, *asked: side.own_answer(*asked)
            )
        forget_dead(self.watch_store, self.others)
        return self.publish(verdict, judge=verdict is not None and self.directory.read_verdict() is None)

    def last_statuses(self) -> dict[int, str]:
        """The last state of each other rank, as the run directory has it; used when the store does not respond."""
        states = {one.rank: f"{one.state} in phase {one.phase} on {one.host}" for one in self.directory.read_statuses()}
        return {rank: states.get(rank, "never") for rank in range(self.env.world_size) if rank != self.env.rank}

    def unwritten(self, error: PreflightError, store: RankStore, *, after: str = "") -> ExitCode:
        """End a run whose record cannot be written: no verdict, but a state for the launcher or one line on stderr."""
        self.board.end("unwritten", error="; ".join(filter(None, (after, str(error)))))
        if not self.output.quiet and self.is_first(store, "unwritten"):
            print_error(error)
        return error.exit_code

    def is_first(self, store: RankStore, what: str) -> bool:
        """True on the first rank that asks, and on every rank when the store does not respond."""
        with suppress(RuntimeError):
            return store.put_first(what, self.env.rank, int) in (self.env.rank, None)
        return True

    def exchange(self, store: RankStore, *, timeout_s: float) -> Exchange:
        """An exchange among all ranks; `store` must be a client that only the calling thread uses."""
        others = StatusBoard(self.directory, store)
        return Exchange(store, range(self.env.world_size), others=others, timeout_s=timeout_s)

    def publish(self, verdict: Verdict | None, *, judge: bool) -> ExitCode:
        """Write the verdict once; the rank that judged also reports it."""
        if verdict is None:
            return ExitCode.FAIL
        is_first = judge and self.directory.write_verdict(verdict)
        if is_first and not self.output.quiet:
            publish(verdict, self.directory, self.output.console, os.environ, amount=self.output.amount)
        return ExitCode(verdict.exit_code)

    def failure(self, error: BaseException) -> Check:
        """An exception of this rank as a failed check, with the user's line."""
        rank, phase = self.env.rank, self.board.phase
        found = failure_check(error, self.session, rank=rank, mode=self.config.modes[-1], phase=phase)
        has_traceback = found.id == CheckId.NO_ERROR and not isinstance(error, PreflightError)
        if has_traceback:
            logger.opt(exception=error).error("rank {} failed in phase {}", rank, phase)
        self.last_state.raised(found)
        return found
