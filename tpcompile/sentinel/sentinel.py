"""Stops a running job within seconds when its ranks diverge, and names the cause; sends nothing in steady state.

Connects the modules: torch's hooks, the log, a timer and the end of the program give events to the protocol, whose
actions are carried out here. No other module imports this class.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.errors import ConfigError, TpCompileError
from tpcompile.evidence.comparison.compare import Allowed
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.timeline.stream import TimedStream
from tpcompile.fastpath import peers
from tpcompile.ranks.domain import domain_of, places_in
from tpcompile.ranks.store import LINE, RankStore
from tpcompile.recording import CaptureSession
from tpcompile.sentinel import events as ev
from tpcompile.sentinel.agreed_values import AgreedValues, check_arguments
from tpcompile.sentinel.alarms import Alarms
from tpcompile.sentinel.asking import Limits
from tpcompile.sentinel.blackbox import BlackBox
from tpcompile.sentinel.block_end import BlockEnd
from tpcompile.sentinel.checks import finding_check
from tpcompile.sentinel.effects import Effects
from tpcompile.sentinel.exception_cause import Losses
from tpcompile.sentinel.executed import Executed
from tpcompile.sentinel.hooks import Hooks, region_name
from tpcompile.sentinel.kept import Keeper
from tpcompile.sentinel.listener import Listener
from tpcompile.sentinel.loop_counters import counters
from tpcompile.sentinel.messages import FINISHED
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.protocol import Protocol
from tpcompile.sentinel.reach import Reach, cut_off
from tpcompile.sentinel.refused_kernels import RefusedKernels
from tpcompile.sentinel.settle import Kernels, Policy, Settlement
from tpcompile.sentinel.shutdown import Shutdown
from tpcompile.sentinel.sink import logger
from tpcompile.sentinel.snapshot import Snapshot
from tpcompile.sentinel.store_log import StoreLog
from tpcompile.sentinel.streams import timed_stream
from tpcompile.sentinel.timeline import Timeline
from tpcompile.sentinel.timer import Timer
from tpcompile.torch_api import watching
from tpcompile.torch_api.point_to_point import Messages

_NUMBERS: dict[str, itertools.count[int]] = {}
_LIVE: weakref.WeakSet[Sentinel] = weakref.WeakSet()
"""Sentinels of this process that are active."""


class Sentinel:
    """Watches everything this process compiles, and compares it with the other ranks of a symmetry domain.

    Every rank creates one with the same arguments after `init_process_group`, and uses it as a context manager:

        with Sentinel(mesh=mesh, axis="tp"):
            for batch in batches:
                step(batch)  # compiled, or with compiled parts

    Nothing is sent while nothing compiles; new code with collectives runs once all ranks have compiled the same.

    mesh: the mesh of the job; without one, all ranks must compile the same.
    axis: the axis of the mesh whose ranks must compile the same, group by group.
    policy: "stop" (write the report, end the process with exit code 1), "warn" (log it, continue, do not compare that
    region again), or a function that is called with the Verdict on every rank.
    allow: intended differences, (layer, text, reason). `watch(..., uneven=reason)` for a whole region.
    kernels: what to do when ranks run different kernels for one graph because each rank timed them itself, with equal
    collectives: "warn" (log it and continue) or "stop".
    tp_aware: custom ops, kernels, passes and backends that are right on a shard. With a mesh whose axis has more than
    one rank, any other that is no TP-aware fast path is a finding, once; it is logged and no policy applies to it.
    run_dir: directory of the report, by default runs/<time>-sentinel-<id>; a taken one gets -2.
    session: records into this session, which it enters and exits, instead of one of its own.
    flow: record the lines of user code that this rank executes, so that a report begins with the branch at which the
    ranks parted. By default where it costs less than 0.5 % of the time, from Python 3.12 on; True also before that,
    where user code then runs several times slower.
    follow: installed packages whose lines are recorded as well.
    prints: print a red verdict, on the rank that judges; it is written to the run directory in any case.
    hang_after_s: seconds in a collective after which a rank asks the other ranks for their state.
    stopped_s: seconds after which a rank is given up whose process is stopped (SIGSTOP), by a debugger for instance.
    unresponsive_s: seconds without an answer after which any other rank is given up, e.g. in a paused container.
    skew_limit_s: the longest wait for a rank that compiles or runs other code.
    connect: makes the client of the job's store, for tests.

    Raises ConfigError without a process group, for an axis the mesh does not have, and at a second block. The end of
    the block raises FastPathError where a fast path waited in vain for a rank.
    """

    def __init__(
        self,
        *,
        mesh: DeviceMesh | None = None,
        axis: str = "tp",
        policy: Policy = "stop",
        allow: Allowed = (),
        kernels: Kernels = "warn",
        tp_aware: Iterable[str] = (),
        run_dir: Path | str | None = None,
        session: CaptureSession | None = None,
        flow: bool | None = None,
        follow: Iterable[str] = (),
        prints: bool = True,
        hang_after_s: float = 3.0,
        stopped_s: float = 60.0,
        unresponsive_s: float = 60.0,
        skew_limit_s: float = 3600.0,
        connect: Callable[[str], RankStore] | None = None,
    ) -> None:
        domain = domain_of(mesh, axis)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.domain = domain.name
        number = next(_NUMBERS.setdefault(self.domain, itertools.count()))
        make = connect or (lambda name: RankStore.connect(name, rank=self.rank, world_size=self.world_size))
        logger.rank = self.rank
        self.log = StoreLog(lambda: make("tpcompile/sentinel"), domain.members, domain=self.domain, number=number)
        self.session = session or CaptureSession(groups=domain.roles, count_regions=False)
        self.policy: Policy = policy
        limits = Limits(hang_after_s, stopped_s, unresponsive_s, skew_limit_s)
        self._progress = Progress(
            lambda found: self._on(ev.WentPast(found)), counters=lambda: counters(sys._getframe(), domain.members)
        )
        self.protocol = Protocol(self.rank, domain.members, self._progress, limits)
        self._timeline, self._black_box = Timeline(), BlackBox()
        self._messages = Messages()
        self.executed = Executed(self.log, self._progress, self._messages, flow=flow, follow=follow)
        self.shutdown = Shutdown(last_act=self._black_box.close)
        self._snapshot = Snapshot(self.protocol, self._messages, main_thread=threading.get_ident())
        self._keeper = Keeper(
            self.log, self._snapshot, self.executed, domain=domain.name, place=lambda: self._settlement.agreed_dir()
        )
        self._settlement = Settlement(
            self.log, session=self.session, progress=self._progress, shutdown=self.shutdown, timeline=self._timeline,
            policy=policy, allow=allow, kernels=kernels, run_dir=run_dir, executed=self.executed,
            snapshot=self._snapshot, prints=prints, place=(self.world_size, domain),
            places=lambda: places_in(mesh),
            command="sentinel" if session is None else "check",  # a session is that of `tpcompile.capture`
            keeper=self._keeper, why_gone=lambda: self._losses.of_gone(),
        )  # fmt: skip
        refused = RefusedKernels(
            self.log, self.session, world_size=self.world_size, tp_size=domain.tp_size,
            tp_aware=frozenset(tp_aware), report=self.findings.append,
        )  # fmt: skip
        self._hooks = Hooks(
            self.rank, self.session, self._progress, on=self._on, note=self._timeline.note,
            say_raising=lambda: self._block_end.compile_raises(),
            on_compile=lambda compile_: self._effects.safely(lambda: refused.on_compile(compile_)),
        )  # fmt: skip
        self._alarms = Alarms(self.log, self.session, self._progress, self._snapshot, ends_job=policy == "stop")
        self._losses = Losses(self.log, self.protocol, self._snapshot)
        self.listener = Listener(self.log, self._on)
        self._timer = Timer(self._on_time, terminated=lambda: self._block_end.terminated(), ends=self.log.close_client)
        self._reach = Reach(
            LINE, limit_s=unresponsive_s, place=lambda: self._snapshot.waits_in(LINE), lost=self._out_of_reach
        )
        self._agreed = AgreedValues(domain.axis, domain.members)
        self._effects = Effects(
            self.log, self.protocol, self._progress, snapshot=self._snapshot, settlement=self._settlement,
            alarms=self._alarms, agreed=self._agreed, limits=limits, keeper=self._keeper,
        )  # fmt: skip
        self._block_end = BlockEnd(
            self.log, self._progress, self.shutdown, session=self.session, policy=policy, losses=self._losses,
            alarms=self._alarms, settlement=self._settlement, effects=self._effects, snapshot=self._snapshot,
            keeper=self._keeper, executed=self.executed,
        )  # fmt: skip
        self.gives_way: Callable[[], None] | None = None
        """Ends this one where the program begins to watch itself; None for a sentinel of the program."""
        self._pid = os.getpid()

    def _on(self, event: ev.Event) -> None:
        self._effects.on(event)

    def _on_time(self, event: ev.Event) -> None:
        self._on(event)
        if isinstance(event, ev.Tick):
            self._keeper.tick(event.now_s)

    @property
    def is_active(self) -> bool:
        """True while this rank is watched."""
        return self._progress.is_active

    @property
    def job(self) -> str:
        """Identity of the job, equal on all ranks; empty before this rank is watched."""
        return self._settlement.job

    @property
    def findings(self) -> list[Verdict]:
        """Red verdicts so far: those of a policy that continues, and ops and kernels that may not run on a shard."""
        return self._settlement.findings

    @property
    def timeline(self) -> list[tuple[float, str, str]]:
        """(Unix time, event, compile id): compiles, alarms and verdicts of this rank; no id for the last two."""
        return self._timeline.entries

    @property
    def stats(self) -> Mapping[str, int]:
        """Counts so far: store operations, compiles, and calls by region."""
        calls = {f"calls of {name}": count for name, count in self._progress.calls().items()}
        return {"store operations": self.log.num_operations, "compiles": self._hooks.num_compiles, **calls}

    def __enter__(self) -> Sentinel:
        if self.listener.has_started:
            raise ConfigError("a Sentinel watches one block: create another one for the next block, on every rank")
        for other in list(_LIVE):
            if other.gives_way is not None:
                other.gives_way()
        self.session.__enter__()
        self._black_box.open()
        self.log.say_here(black_box=self._black_box.name)
        with suppress(TpCompileError):  # said where there is something to write
            self._settlement.agreed_dir()  # a rank that is cut off later cannot ask for it
        self._hooks.install()
        self._messages.install()
        self.executed.open(self._black_box.name)
        self._keeper.open()
        self._progress.is_active = True
        _LIVE.add(self)
        self.listener.start()
        self._timer.start()
        self._reach.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        unseen = peers.failure() if error is None else None
        is_exit = isinstance(error, SystemExit) and not error.code
        failure = unseen or (None if is_exit else error)
        self.executed.raised(error)
        if self.is_active and not isinstance(failure, KeyboardInterrupt):  # somebody ends the job, which is no finding
            self._block_end.reached() if failure is None else self._block_end.raised(failure)
        self.close(FINISHED if failure is None else f"{type(failure).__name__}: {failure}")
        if unseen is not None:
            raise unseen

    def close(self, why: str = FINISHED) -> None:
        """Stop watching: end threads, close connections, remove hooks, and publish that this rank left."""
        was_active = self.is_active
        self._on(ev.Leaving())
        _LIVE.discard(self)
        if not self.listener.has_started or os.getpid() != self._pid:
            return  # a forked child owns none of this
        self._hooks.remove()
        self._messages.remove()
        self._reach.close()
        if was_active:
            self._block_end.say_left(why, has_heard=self.listener.has_ended)
        self._timer.close()
        if self.shutdown.unwinds:
            self.shutdown.stay_for_sigterm(self._timer.signals)
        else:
            self._timer.signals.restore()
        self._effects.close()
        self.listener.close()
        with suppress(RuntimeError):  # the rank that serves the store has ended
            if why == FINISHED and not self.findings and self.log.all_finished():
                self._keeper.forget()
            self.log.forget()
        self.log.close_client()
        self._black_box.close()
        self.executed.close()
        self.session.__exit__(None, None, None)

    def agree(self, name: str, value: Any, *, every: int = 1, step: int | None = None) -> None:
        """Say that this value is equal on all ranks of the domain; the job ends, or goes on, by the policy if not.

        Each rank calls it as often and in the same order, outside of compiled regions and of captured CUDA graphs. Only
        a hash is taken, on the value's device and without waiting for it; ranks compare some seconds later, and when
        the block ends. Every bit counts: a NaN equals the same NaN, -0.0 is not 0.0.

        name: names the value in the report, up to 200 characters.
        value: a tensor of any shape and dtype, a Python number or text, or a list, tuple, dict or dataclass of them. Of
        a DTensor what is replicated on the axis.
        every: compare the first of so many calls with this name, as for parameters.
        step: shown in the report beside the number of the call.

        Raises ConfigError before the block begins, for a sharded DTensor, and for what cannot be compared.
        """
        self._agrees(name, value, every, step, sys._getframe(1))

    def _agrees(self, name: str, value: Any, every: int, step: int | None, frame: FrameType) -> None:
        check_arguments(name, every)
        if not self.listener.has_started:
            raise ConfigError(f"agree({name!r}) before the block of the sentinel: call it inside of `with Sentinel()`")
        if self.is_active and not self.protocol.has_parted:
            self._agreed.add(name, value, every=every, step=step, frame=frame)

    def _agreeing(self, call: Callable[..., Any], name: str, every: int) -> Callable[..., Any]:
        """`call`, whose results are values that must be equal."""

        def agrees(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)
            self._agrees(name, found, every, None, sys._getframe(1))
            return found

        return agrees

    def watch(self, target: Any, *, name: str = "", uneven: str = "", agree: str = "", every: int = 1) -> Any:
        """`target`, a compiled callable or a module, as a region of its own; a module is changed in place and returned.

        All regions are watched anyway. One made here has a name, counts even if never compiled, and may be `uneven`:
        its content may differ between ranks for that reason (the tokens of an expert), its collectives may not. So may
        that of other calls of a function's code.

        agree: its results must be equal on all ranks; the name of the value, as in `agree`, and so is `every`.
        """
        if agree:
            check_arguments(agree, every)
        region = self._progress.region(name or region_name(target))
        region.reason_uneven = uneven
        watched = self._hooks.watched(target, region)
        if uneven and watched is not target:  # it can still be called by its own name
            self._progress.region(region_name(target)).reason_uneven = uneven
        return watching.wrap_calls(watched, lambda call: self._agreeing(call, agree, every)) if agree else watched

    def wait_for_finding(self, known: int) -> None:
        """Give the ranks time to settle an alarm before this process ends; it had `known` findings before."""
        self._block_end.wait_for_finding(known)

    def interrupted(self) -> None:
        """Somebody ends the job: where this rank has waited in vain, have the ranks settle for whom."""
        self._block_end.interrupted()

    def forget(self) -> None:
        """Stop in a forked child: connections, threads and the signal pipe belong to the parent."""
        self._progress.is_active = False
        self._timer.signals.forget()

    def _out_of_reach(self, silent_s: float) -> None:
        """The node of this rank is cut off, and nothing that it waits for can come."""
        found = cut_off(self._snapshot.state(), silent_s=silent_s)
        if self.policy == "stop" and self.shutdown.exit_code is None:
            LINE.give_up(found.observed)
            self._settlement.settle_alone(finding_check(found))
        else:
            logger.warning("rank {}: {}", self.rank, found.observed)

    def stream(self) -> TimedStream:
        """What this rank did so far, as far as torch's flight recorder has it."""
        return timed_stream(self._snapshot.state(), time.time())


def _in_a_forked_child() -> None:
    """Disable sentinels in a forked worker: it has the parent's connections, but none of its threads."""
    for sentinel in _LIVE:
        sentinel.forget()
    _LIVE.clear()


os.register_at_fork(after_in_child=_in_a_forked_child)
