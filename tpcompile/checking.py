"""A program of the user's own -> what each rank compiled, while the ranks are watched -> one verdict on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.errors import ConfigError, DivergenceError
from tpcompile.evidence.comparison.compare import Allowed
from tpcompile.evidence.judgement.verdict import capture_rules
from tpcompile.evidence.records import Verdict
from tpcompile.ranks.answered import while_answered
from tpcompile.ranks.domain import ALONE, Domain, domain_of
from tpcompile.ranks.exchange import Exchange
from tpcompile.ranks.recorded import record_side
from tpcompile.ranks.run_dir import agreed_job, agreed_run_dir
from tpcompile.ranks.store import RankStore
from tpcompile.recording import CaptureSession
from tpcompile.report.verdict import Evidence, ReportedVerdict
from tpcompile.sentinel import Policy, Sentinel

_NUMBERS = itertools.count()
_SILENT_S = 60.0
"""A store that has not answered for so long is given up, as by the sentinel."""
_LEAVING_S = 20.0
"""Rank 0, which serves the store of a job that torchrun did not start, waits so long for ranks that still read."""


class Capture:
    """What the ranks of a job compile while it is active; see `capture`."""

    def __init__(
        self,
        domain: Domain,
        *,
        session: CaptureSession,
        sentinel: Sentinel | None,
        allowed: Allowed,
        tp_aware: tuple[str, ...],
        num_breaks: int | None,
        alone: bool,
    ) -> None:
        self.domain, self.session, self.sentinel = domain, session, sentinel
        self.allowed, self.tp_aware, self.num_breaks, self.alone = allowed, tp_aware, num_breaks, alone
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.sentinel or self.session)  # a sentinel enters the session
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is compiled inside is reported under this name. Nothing has to be in a phase."""
        with self.session.phase(name):
            yield


def capture(
    mesh: DeviceMesh | None = None,
    *,
    axis: str = "tp",
    watch: bool = True,
    policy: Policy = "stop",
    allow: Allowed = (),
    tp_aware: Iterable[str] = (),
    num_breaks: int | None = 0,
    alone: bool = False,
    run_dir: Path | str | None = None,
) -> Capture:
    """Record what this rank compiles, for `check`; on every rank, after `init_process_group`.

        with tpcompile.capture(mesh) as run:
            train_step(batch)
        verdict = tpcompile.check(run)

    A program without a process group is recorded as a job of one rank, in which nothing is compared: its verdict is
    incomplete (exit code 6).

    mesh: the mesh of the job; without one, all ranks must compile the same.
    axis: the axis of the mesh whose ranks must compile the same, group by group.
    watch: compare the ranks while they run, too (`tpcompile.Sentinel`). A collective that a rank leaves out or adds
        would otherwise hang the job before `check` is reached.
    policy: what `watch` does with a divergence. "stop": the job ends within seconds, with a printed verdict and exit
        code 1; "warn": it is logged; or a function that gets the Verdict on every rank.
    run_dir: where a verdict of `watch` is written, by default runs/<time>-sentinel-<id>.
    allow: intended differences, (layer, text, reason).
    tp_aware: custom ops, kernels, passes and backends that are right on a shard.
    num_breaks: places (line and reason) at which the graphs break on each rank by intent, 0 by default; None for any
        number. More or fewer are red.
    alone: a job of one rank is meant, and passes if all else is right.

    Raises ConfigError for a `num_breaks` that is no such number.
    """
    if num_breaks is not None and (isinstance(num_breaks, bool) or not isinstance(num_breaks, int) or num_breaks < 0):
        raise ConfigError(f"num_breaks={num_breaks!r}: pass the number of graph breaks that are meant, or None for any")
    allow, tp_aware = tuple(allow), tuple(tp_aware)  # read twice
    domain = domain_of(mesh, axis) if dist.is_initialized() else ALONE
    session = CaptureSession(groups=domain.roles)
    sentinel = None
    if watch and len(domain.members) > 1:
        sentinel = Sentinel(
            mesh=mesh, axis=axis, policy=policy, allow=allow, tp_aware=tp_aware, run_dir=run_dir, session=session
        )
    return Capture(
        domain, session=session, sentinel=sentinel, allowed=allow, tp_aware=tp_aware, num_breaks=num_breaks,
        alone=alone,
    )  # fmt: skip


def check(run: Capture, *, timeout_s: float = 300.0) -> ReportedVerdict:
    """Compare what all ranks captured; every rank calls it, every rank gets the verdict.

    Something was compiled, without graph breaks other than those expected, and the ranks of a group agree, layer by
    layer. Groups are compared apart. Talks through the store of the job; no collective.

    run: what `capture` returned, after its block.
    timeout_s: seconds after which a rank that does not call is a failed check with its number.

    Raises DivergenceError when the judging rank, or the store of the job, stops responding.
    """
    answered = partial(while_answered, silent_s=min(timeout_s, _SILENT_S))
    client, job, run_dir = answered(_begun)
    domain = run.domain
    record = run.session.record(
        rank=client.rank,
        world_size=client.world_size,
        domain=domain.name,
        coordinate=domain.coordinate,
        coordinates=domain.coordinates,
        tp_size=domain.tp_size,
        tp_aware=run.tp_aware,
        job=job,
    )
    rules = capture_rules(timeout_s=timeout_s, allowed=run.allowed, num_breaks=run.num_breaks, alone=run.alone)
    sentinel = run.sentinel
    side = (
        record_side(record, rules)
        if sentinel is None
        else record_side(record, rules, flow_of=sentinel.executed.flow_of, domain=sentinel.log.members)
    )
    exchange = Exchange(client, range(client.world_size), others=_NoStatus(), timeout_s=timeout_s)

    def talk() -> Verdict | None:
        found = exchange.verdict(side)
        client.leave_together(timeout_s=min(timeout_s, _LEAVING_S))
        return found

    verdict = answered(talk)
    if verdict is None:
        raise DivergenceError(
            f"rank {client.rank} got no verdict within {timeout_s:g} s; the judging rank stopped responding"
        )
    evidence = Evidence(
        record=record, run_dir=run_dir, timeout_s=timeout_s, allowed=run.allowed, num_breaks=run.num_breaks,
        alone=run.alone,
    )  # fmt: skip
    return ReportedVerdict.of(verdict, evidence)


def _begun() -> tuple[RankStore, str, Path]:
    """A client for the next check, the identity of the run, and where its verdict goes."""
    prefix = f"tpcompile/check/{next(_NUMBERS)}"
    if dist.is_initialized():
        client = RankStore.connect(prefix, rank=dist.get_rank(), world_size=dist.get_world_size())
    else:
        client = RankStore.alone()
    return client, agreed_job(client), agreed_run_dir(client, "check")


class _NoStatus:
    """Peer status for jobs without a status board."""

    def last_seen(self, rank: int) -> str:
        """Always `unknown`: nothing is published."""
        return "unknown"

    def is_gone(self, rank: int) -> bool:
        """False: the state of the process is not known."""
        return False
