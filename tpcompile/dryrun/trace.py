"""One rank of the job, in a process that is forked for it -> its record, and the check that its exception fails."""

from __future__ import annotations

import pickle
import random
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpcompile.dryrun.machine import Machine
from tpcompile.dryrun.plan import Asked, Plan
from tpcompile.dryrun.reach import CannotTellError, state_of
from tpcompile.dryrun.reads import watched_reads
from tpcompile.errors import ConfigError, TargetRaised
from tpcompile.evidence.records import Check, RankRecord, UserLine
from tpcompile.evidence.text.lines import installed_in, is_library_file
from tpcompile.gate.failure import failure_check
from tpcompile.ranks.domain import Domain, domain_of
from tpcompile.recording import CaptureSession
from tpcompile.recording.session import places
from tpcompile.target import Inputs, Target, build, call_target, raised_by
from tpcompile.torch_api.c10d import GroupMade, group_of_name, groups_made
from tpcompile.torch_api.compiler import group_roles
from tpcompile.typecheck.check import fake_ranks

BUILD, FIRST, AGAIN, RESIZED = "build", "first call", "second call", "resized"
"""Phases of a rank."""
_NEEDS_GPU = "{} needs a GPU, and its tensors are on meta ({}); --arch sm_90 shows it one that is not there"
_MAX_SAID = 120
"""Characters of an exception."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What a rank left."""

    domain: Domain
    record: RankRecord | None = None
    """None where it is that of the rank `same_as`."""
    start: str = ""
    """Hash of what its calls started from; empty where that was not asked for, or is not visible."""
    same_as: int | None = None
    """The rank that was traced from the same start."""
    is_watched: bool = False
    reads_in_build: Mapping[UserLine, None] = field(default_factory=dict)
    reads_in_calls: Mapping[UserLine, None] = field(default_factory=dict)
    """Lines outside of torch that read the rank, where that was watched."""
    draws: bool = False
    """Its calls drew random numbers, with seeds that ranks may have of their own."""
    groups: tuple[GroupMade, ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)
    allow: Sequence[tuple[str, str, str]] = ()
    """Differences that its target declares."""
    failed: Check | None = None
    """The exception that ended it."""


def traced(plan: Plan, rank: int, asked: Asked) -> Traced:
    """Build the target as this rank, and compile it in every phase of the gate; build it alone where its calls would
    start as those of a rank that was traced.

    Raises ConfigError for a target that cannot be built: each rank would say so.
    """
    for name in asked.users_modules:
        # What they read of the rank is read when they are imported. Installed packages stay: they were imported before
        # the ranks were forked.
        sys.modules.pop(name, None)
    kept = frozenset(sys.modules)
    names, sizes = zip(*plan.axes, strict=True)
    session = CaptureSession()
    machine = Machine(plan.arch)
    with fake_ranks(plan.world_size, rank=rank), machine.compiling(), session, groups_made() as groups:
        mesh = init_device_mesh(machine.mesh_type, sizes, mesh_dim_names=names)
        run = _Run(machine, plan, asked, session, mesh, kept)
        failed = None
        try:
            run.all_phases(rank)
        except TargetRaised as raised:
            error = raised.__cause__ or raised
            if asked.is_first and not plan.arch and _is_of_gpu(error):
                said = f"{type(error).__name__}: {error}".split("\n")[0][:_MAX_SAID]
                raise ConfigError(_NEEDS_GPU.format(plan.target, said)) from error
            failed = failure_check(error, session, rank=rank, mode="", phase=run.phase)
        record = run.record(rank) if run.same_as is None else None
    return Traced(
        domain=run.domain,
        record=record,
        start=run.start,
        same_as=run.same_as,
        is_watched=run.is_watched,
        reads_in_build=run.reads_in_build,
        reads_in_calls=run.reads_in_calls,
        draws=run.draws,
        groups=tuple(groups),
        places=places(),
        allow=() if run.target is None else tuple(run.target.allow),
        failed=failed,
    )


def _is_of_gpu(error: BaseException) -> bool:
    """True where the exception is that there is no GPU: it says so, or the line that raises it, or Triton raises it."""
    frames = traceback.extract_tb(error.__traceback__)
    is_named = any("cuda" in text.lower() for text in (str(error), *(frame.line or "" for frame in frames[-1:])))
    return is_named or any("/triton/" in frame.filename for frame in frames)


class _Run:
    """The phases of one rank."""

    def __init__(
        self,
        machine: Machine,
        plan: Plan,
        asked: Asked,
        session: CaptureSession,
        mesh: DeviceMesh,
        kept: Collection[str],
    ) -> None:
        self.machine, self.plan, self.asked, self.session, self.mesh = machine, plan, asked, session, mesh
        self.kept = kept
        """Modules that were imported before."""
        self.domain = domain_of(mesh, plan.axis)  # of a rank whose build raises: where the target says no different
        self.target: Target | None = None
        self.phase = BUILD
        self.roles: Mapping[str, str] = {}
        """Roles of the process groups, by name."""
        self.start = ""
        self.same_as: int | None = None
        self.is_watched = asked.is_watched
        self.reads_in_build: Mapping[UserLine, None] = {}
        self.reads_in_calls: Mapping[UserLine, None] = {}
        self.draws = False

    def all_phases(self, rank: int) -> None:
        """Build and call the target. Raises TargetRaised where the user's code or torch does."""
        device = self.machine.device
        with _watched(self.is_watched) as self.reads_in_build, self.machine.building(), self._in(BUILD):
            self.target = target = build(
                self.plan.target, self.plan.settings, rank=rank, device=device, mesh=self.mesh
            )  # fmt: skip
        axis = target.axis if target.mesh or target.axis in dict(self.plan.axes) else self.plan.axis
        self.domain = domain_of(target.mesh or self.mesh, axis)
        self.machine.lowers = self.plan.lowers_all or self.plan.ranks[0] in self.domain.members
        self.roles = {**_roles_by_step(), **(self.domain.roles or {})}
        if self.asked.starts is not None:
            self._look_up(self.asked.starts, target, rank)
        if self.same_as is None:
            self._calls(target)

    def _look_up(self, starts: Mapping[str, int], target: Target, rank: int) -> None:
        """Find a rank that was traced from the same start, at the same place along the innermost axis."""
        with suppress(CannotTellError):
            place = (
                rank % self.plan.group_size, self.domain.coordinate, len(self.domain.members), self.machine.lowers
            )  # fmt: skip
            self.start = f"{place} {state_of(target, self.roles, users_modules(without=self.kept))}"
        known = starts.get(self.start) if self.start else None
        self.same_as = None if self.asked.is_traced else known
        self.is_watched = bool(self.start) and known is None

    def _calls(self, target: Target) -> None:
        self.session.know_groups(self.roles)
        self.session.read_environment()
        program = target.program if target.is_compiled else torch.compile(target.program)
        phases: list[tuple[str, Inputs | None]] = [
            (FIRST, target.inputs), (AGAIN, target.inputs), (RESIZED, target.resized)
        ]  # fmt: skip
        before = _random_states()
        with _watched(self.is_watched) as self.reads_in_calls:
            for phase, inputs in phases:
                if inputs is None:
                    continue
                with self.machine.calling(), self._in(phase), raised_by(self.plan.target):
                    self.session.count_call()
                    call_target(target, program, inputs)
        self.draws = before != _random_states()

    @contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        self.phase = phase
        with self.session.phase(phase):
            yield

    def record(self, rank: int) -> RankRecord:
        """The record of what was compiled so far."""
        return self.session.record(
            rank=rank,
            world_size=self.plan.world_size,
            domain=self.domain.name,
            coordinate=self.domain.coordinate,
            tp_size=self.domain.tp_size,
            tp_aware=() if self.target is None else self.target.tp_aware,
        )


def _watched(is_watched: bool) -> AbstractContextManager[Mapping[UserLine, None]]:
    return watched_reads() if is_watched else nullcontext({})


def _roles_by_step() -> dict[str, str]:
    """Roles of groups without a description: neighbours in rank, and ranks of different nodes, may be as many."""
    roles = {}
    for name, role in group_roles().items():
        ranks = dist.get_process_group_ranks(group_of_name(name))
        steps = sorted({after - before for before, after in pairwise(ranks)})
        roles[name] = f"{role} step {','.join(map(str, steps))}" if role[0].isdigit() else role
    return roles


def _random_states() -> tuple[Any, ...]:
    """States of the generators that a program draws from on a CPU; one on meta has no values to draw."""
    numpy = sys.modules.get("numpy")
    of_numpy = b"" if numpy is None else pickle.dumps(numpy.random.get_state())
    return random.getstate(), of_numpy, torch.get_rng_state().numpy().tobytes()


def users_modules(*, without: Collection[str] = ()) -> list[str]:
    """Names of the imported modules that are the user's own, without some names, in the order of their import."""
    found = []
    for name, module in list(sys.modules.items()):
        if name in without:  # before the module is looked at: that copies a page from the parent
            continue
        file = getattr(module, "__file__", None)
        is_ours = name == "__main__" or name.startswith("tpcompile")
        if file is not None and not is_ours and not installed_in(file) and not is_library_file(file):
            found.append(name)
    return found


def installed_modules() -> dict[str, None]:
    """Names of the imported modules of installed packages, in the order of their import."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {name: None for name, file in files.items() if file is not None and installed_in(file)}
