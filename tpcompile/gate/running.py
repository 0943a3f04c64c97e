"""A process group and a configuration -> the modes or the target, in order, on this rank, and how that ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from loguru import logger
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpcompile.choices import TARGET
from tpcompile.config import RunConfig, TargetConfig
from tpcompile.errors import ExitCode, PreflightError
from tpcompile.evidence.records import Check, CheckId
from tpcompile.gate.collective_agreement import Agreement, is_agreeing
from tpcompile.gate.ending import Ending, Output, refuse
from tpcompile.gate.failure import failure_check
from tpcompile.gate.faults import Fault, FaultContext
from tpcompile.gate.last_state import LastState
from tpcompile.gate.modes import MODES, Run
from tpcompile.gate.phases import InStep, Phases
from tpcompile.gate.record import Evidence
from tpcompile.gate.reference import StackReference, free
from tpcompile.gate.status import StatusBoard
from tpcompile.gate.target import BUILD, declared, run_target
from tpcompile.gate.watch import Watch
from tpcompile.ranks.domain import mesh_roles
from tpcompile.ranks.store import LINE, RankStore
from tpcompile.recording import CaptureSession
from tpcompile.sentinel.checks import finding_check
from tpcompile.sentinel.reach import Reach, cut_off
from tpcompile.target import TargetContext, TargetError, find, target_of


class Gate:
    """One rank's run."""

    def __init__(self, evidence: Evidence, prefix: str, output: Output) -> None:
        """Keys in the job's store begin with `prefix`."""
        self.evidence = evidence
        config, env, directory = evidence.config, evidence.env, evidence.directory

        def connect() -> RankStore:
            return RankStore.connect(prefix, rank=env.rank, world_size=env.world_size)

        self.store, self.watch_store = connect(), connect()
        self.board = StatusBoard(directory, self.store, prints_phases=output.amount == "all")
        others = StatusBoard(directory, self.watch_store)
        self.last_state = LastState(env.rank)
        self.ending = Ending(evidence, output, self.board, self.last_state, self.watch_store, others)
        mode = config.modes[-1]
        self.watch = Watch(self.watch_store, self.ending.last_words, mode=mode, died=others.died, stuck=self.stuck)
        self.agreement = Agreement(connect(), config, self.board, self.watch.end)
        self.ranks = InStep(config.gate, self.store, self.board, self.watch, self.last_state, self.agreement)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The watch runs, and a rank that aborts leaves its stack."""
        limit_s = self.evidence.config.gate.store_timeout_s
        reach = Reach(LINE, limit_s=limit_s, place=self.last_state.waits_in, lost=self.cut_off)
        self.last_state.open(self.store)
        reach.start()
        try:
            with self.watch:
                yield
        finally:
            reach.close()
            self.last_state.close()

    def cut_off(self, silent_s: float) -> None:
        """End this rank, with the ranks of its node: the others cannot be reached. Does not return."""
        found = finding_check(cut_off(self.last_state.state(), silent_s=silent_s))
        LINE.give_up(found.observed)
        self.watch.end(found.changed(mode=self.evidence.config.modes[-1]))

    def run(self, device: torch.device, fault: Fault, context: FaultContext) -> ExitCode:
        """All modes, then the exchange; any failure ends in a verdict."""
        evidence = self.evidence
        self.board.enter("start")
        try:
            evidence.write_config(device)
        except PreflightError as error:
            self.watch.alarm(self.failure(error))  # the others must not wait for this rank
            self.watch.stop()
            return self.ending.unwritten(error, self.store)
        try:
            with ExitStack() as stack:
                # The block, the roles and the declared collectives use the group of this mesh. It is the default
                # group, except for CPU ranks of a machine with GPUs: there torch makes a second group.
                mesh = init_device_mesh(device.type, (evidence.env.world_size,), mesh_dim_names=("tp",))
                evidence.session = stack.enter_context(self.new_session(mesh, fault, context))
                if isinstance(evidence.config, TargetConfig):
                    self.run_target(evidence.config, device, mesh, evidence.session)
                elif isinstance(evidence.config, RunConfig):
                    self.run_block(evidence.config, device, mesh, evidence.session, fault, context)
        except TargetError as error:
            self.watch.stop()
            quiet = self.ending.output.quiet
            return refuse(error, evidence.config, evidence.directory.path, rank=evidence.env.rank, quiet=quiet)
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
        group = mesh.get_group("tp")
        self.evidence.phases = run = Run(
            config=config, device=device, session=session, ranks=self.ranks,
            group=group, reference=reference, fault=fault, context=context, folder=self.evidence.directory.path,
        )  # fmt: skip
        for mode in config.modes:
            session.reset_compiler()
            self.agreement.mode = mode
            MODES[mode](run)
            if mode != config.modes[-1] or device.type == "cuda":
                free(device)

    def run_target(self, config: TargetConfig, device: torch.device, mesh: DeviceMesh, session: CaptureSession) -> None:
        """Build the user's program while the watch runs, then run it phase by phase."""
        self.ranks.begin(BUILD, f"build {config.target}")
        self.ranks.arrive(BUILD)  # a rank that raises at once must find the others able to report
        session.reset_compiler()  # this process may have run the gate before
        env = self.evidence.env
        context = TargetContext(
            rank=env.rank, world_size=env.world_size, device=device, mesh=mesh, settings=config.settings
        )
        target = target_of(config, find(config)(context))
        session.read_environment()
        config, domain = declared(config, target, mesh)
        self.evidence.config, self.evidence.domain = config, domain
        session.know_groups(domain.roles or {})
        self.evidence.write_config(device)
        self.agreement.members, self.agreement.mode = domain.members, TARGET
        folder = self.evidence.directory.path
        phases = self.evidence.phases = Phases(
            config=config, device=device, session=session, ranks=self.ranks, folder=folder
        )  # fmt: skip
        run_target(phases, target, (target.mesh or mesh).get_group(target.axis))

    def new_session(self, mesh: DeviceMesh, fault: Fault, context: FaultContext) -> CaptureSession:
        """A capture session that knows the mesh and compares every compile before its code runs."""
        return CaptureSession(
            groups=mesh_roles(mesh),
            on_compile_start=partial(self.compile_starts, fault, context),
            on_compile=self.agreement.on_compile,
            records_fusion=self.evidence.config.compile.backend == "inductor",
        )

    def compile_starts(self, fault: Fault, context: FaultContext, compile_id: str) -> None:
        """Publish the compile id, so that a rank that dies or hangs in it is reported with it."""
        self.board.publish(f"compiling {compile_id}")
        fault.phase("compiling", context)

    def stuck(self) -> Check | None:
        """The failed check of a collective that does not end; while a target is built, a rank may load for long."""
        if self.board.phase in ("start", BUILD):
            return None
        config = self.evidence.config
        found = self.last_state.waits_too_long(config.gate.store_timeout_s, config.modes[-1])
        return None if found is None or is_agreeing(self.watch_store) else found

    def finish(self) -> ExitCode:
        """Exchange digests, publish the verdict and return the exit code."""
        evidence = self.evidence
        self.ranks.begin("verdict", "compare ranks", timeout_s=4 * evidence.config.gate.store_timeout_s)
        self.ranks.arrive("verdict")
        try:
            verdict = self.ending.verdict(self.store)
        except PreflightError as error:
            self.watch.stop()
            return self.ending.unwritten(error, self.store)
        self.watch.stop()
        self.board.publish("finished")
        is_first_rank = evidence.env.rank == 0
        code = self.ending.publish(verdict, judge=is_first_rank)
        if is_first_rank and evidence.session is not None and code == ExitCode.PASS:
            evidence.fusion.tighten(evidence.session)
        return code

    def failure(self, error: BaseException) -> Check:
        """An exception of this rank as a failed check, with the user's line."""
        rank, phase = self.evidence.env.rank, self.board.phase
        mode = self.evidence.config.modes[-1]
        found = failure_check(error, self.evidence.session, rank=rank, mode=mode, phase=phase)
        has_traceback = found.id == CheckId.NO_ERROR and not isinstance(error, PreflightError)
        if has_traceback:
            logger.opt(exception=error).error("rank {} failed in phase {}", rank, phase)
        self.last_state.raised(found)
        return found
