"""One rank of the job, in a process that is forked for it -> its record, and the check that its exception fails."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.dryrun.machine import Machine
from tpcompile.dryrun.plan import Plan
from tpcompile.errors import ConfigError, TargetRaised
from tpcompile.evidence.records import Check, RankRecord
from tpcompile.evidence.text.lines import installed_in, is_library_file
from tpcompile.gate.failure import failure_check
from tpcompile.ranks.domain import Domain, domain_of
from tpcompile.recording import CaptureSession
from tpcompile.target import Inputs, Target, build, call_target, raised_by
from tpcompile.typecheck.check import fake_ranks

BUILD, FIRST, AGAIN, RESIZED = "build", "first call", "second call", "resized"
"""Phases of a rank."""


_NEEDS_GPU = "{} needs a GPU, and its tensors are on meta ({}); --arch sm_90 shows it one that is not there"

_MAX_SAID = 120
"""Characters of an exception."""


class Traced(NamedTuple):
    """What a rank left."""

    record: RankRecord
    allow: Sequence[tuple[str, str, str]] = ()
    """Differences that its target declares."""
    failed: Check | None = None
    """The exception that ended it."""


def traced(plan: Plan, rank: int) -> Traced:
    """Build the target as this rank, and compile it in every phase of the gate.

    Raises ConfigError for a target that cannot be built: each rank would say so.
    """
    names, sizes = zip(*plan.axes, strict=True)
    session = CaptureSession()
    machine = Machine(plan.arch)
    with fake_ranks(plan.world_size, rank=rank), machine.compiling(), session:
        mesh = init_device_mesh(machine.mesh_type, sizes, mesh_dim_names=names)
        run = _Run(machine, plan, session, Domain("world", list(range(plan.world_size)), None, rank))
        failed = None
        try:
            run.all_phases(rank, mesh)
        except TargetRaised as raised:
            error = raised.__cause__ or raised
            if rank == plan.ranks[0] and not plan.arch and _is_of_gpu(error):
                raise ConfigError(_NEEDS_GPU.format(plan.target, _shortened(error))) from error
            failed = failure_check(error, session, rank=rank, mode="", phase=run.phase)
        domain = run.domain
        record = session.record(
            rank=rank,
            world_size=plan.world_size,
            domain=domain.name,
            coordinate=domain.coordinate,
            tp_size=domain.tp_size,
            tp_aware=() if run.target is None else run.target.tp_aware,
        )
    return Traced(record, () if run.target is None else tuple(run.target.allow), failed)


def _is_of_gpu(error: BaseException) -> bool:
    """True where the exception is that there is no GPU: it says so, or the line that raises it, or Triton raises it."""
    frames = traceback.extract_tb(error.__traceback__)
    is_named = any("cuda" in text.lower() for text in (str(error), *(frame.line or "" for frame in frames[-1:])))
    return is_named or any("/triton/" in frame.filename for frame in frames)


def _shortened(error: BaseException) -> str:
    line = f"{type(error).__name__}: {error}".split("\n")[0]
    return line[:_MAX_SAID]


class _Run:
    """The phases of one rank."""

    def __init__(self, machine: Machine, plan: Plan, session: CaptureSession, domain: Domain) -> None:
        self.machine, self.plan, self.session, self.domain = machine, plan, session, domain
        self.target: Target | None = None
        self.phase = BUILD

    def all_phases(self, rank: int, mesh: torch.distributed.device_mesh.DeviceMesh) -> None:
        """Build and call the target. Raises TargetRaised where the user's code or torch does."""
        device = self.machine.device
        with self.machine.building(), self._in(BUILD):
            self.target = target = build(self.plan.target, self.plan.settings, rank=rank, device=device, mesh=mesh)
        own_mesh = target.mesh or mesh
        axis = target.axis if target.mesh or target.axis in dict(self.plan.axes) else self.plan.axes[-1][0]
        self.domain = domain_of(own_mesh, axis)
        self.machine.lowers = self.plan.lowers_all or self.plan.ranks[0] in self.domain.members
        self.session.know_groups(self.domain.roles or {})
        self.session.read_environment()
        program = target.program if target.is_compiled else torch.compile(target.program)
        phases: list[tuple[str, Inputs | None]] = [
            (FIRST, target.inputs), (AGAIN, target.inputs), (RESIZED, target.resized)
        ]  # fmt: skip
        for phase, inputs in phases:
            if inputs is not None:
                self._call(phase, target, program, inputs)

    def _call(self, phase: str, target: Target, program: object, inputs: Inputs) -> None:
        with self.machine.calling(), self._in(phase), raised_by(self.plan.target):
            self.session.count_call()
            call_target(target, program, inputs)

    @contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        self.phase = phase
        with self.session.phase(phase):
            yield


def forget_users_modules() -> None:
    """Let this rank import the user's own modules itself: what they read of the rank is read when they are imported.

    Installed packages stay: they were imported before the ranks were forked.
    """
    kept = installed_modules()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_ours = name == "__main__" or name.startswith("tpcompile")
        if file is not None and name not in kept and not is_ours and not is_library_file(file):
            del sys.modules[name]


def installed_modules() -> dict[str, None]:
    """Names of the imported modules of installed packages, in the order of their import."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {name: None for name, file in files.items() if file is not None and installed_in(file)}
