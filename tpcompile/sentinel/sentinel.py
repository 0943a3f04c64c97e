"""A running job -> divergence between its ranks ends in seconds, with the cause; steady state costs nothing."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.capture import CaptureSession
from tpcompile.dist.mesh import mesh_roles
from tpcompile.dist.store import RankStore
from tpcompile.errors import ConfigError
from tpcompile.evidence.compare import Allowed
from tpcompile.evidence.ranktext import ranks_text
from tpcompile.evidence.records import Verdict
from tpcompile.sentinel import adapter
from tpcompile.sentinel.blackbox import BlackBox
from tpcompile.sentinel.channel import Channel
from tpcompile.sentinel.clock import Clock
from tpcompile.sentinel.compiling import Compiling, region_name
from tpcompile.sentinel.ending import Ending, Kernels
from tpcompile.sentinel.following import Follower
from tpcompile.sentinel.messages import Position, RankState
from tpcompile.sentinel.problems import Problems
from tpcompile.sentinel.rounds import Rounds, state_of
from tpcompile.sentinel.shutdown import Shutdown
from tpcompile.sentinel.sink import logger

Policy = Literal["stop", "warn"] | Callable[[Verdict], None]
_NUMBERS: dict[str, itertools.count[int]] = {}
_LIVE: weakref.WeakSet[Sentinel] = weakref.WeakSet()
"""Sentinels of this process that are active."""
_CLOSE_S, _DECIDE_S = 10.0, 2.0


class Sentinel:
    """Watches everything this process compiles, and compares it with the other ranks of a symmetry domain.

    Every rank makes one, alike, after `init_process_group`, and uses it as a context manager:

        with Sentinel(mesh=mesh, axis="tp"):
            for batch in batches:
                step(batch)  # compiled, or with compiled parts

    Ranks of one group of `axis` must compile the same; without a mesh, all ranks. Nothing is sent while nothing
    compiles; code with collectives runs for the first time when all ranks have compiled the same.

    policy: "stop" (write the report, end the process with exit code 1), "warn" (log it, go on, not look at that region
    again), or a function that gets the Verdict on every rank and decides itself.
    allow: intended differences, (layer, text, reason). `watch(..., uneven=reason)` for a whole region.
    kernels: what to do when ranks run other kernels for one graph because each timed them for itself; the collectives
    are equal then. "warn" goes on.
    run_dir: where a report goes, by default runs/<time>-sentinel, made when there is something to report.
    hang_after_s: a rank that waits in a collective for so long asks the others what they do.
    unresponsive_s: a rank that does not answer for so long is given up.
    skew_limit_s: the longest wait for a rank that compiles or runs other code.

    Raises ConfigError without a process group, and for an axis the mesh does not have.
    """

    def __init__(
        self,
        *,
        mesh: DeviceMesh | None = None,
        axis: str = "tp",
        policy: Policy = "stop",
        allow: Allowed = (),
        kernels: Kernels = "warn",
        run_dir: Path | str | None = None,
        hang_after_s: float = 3.0,
        unresponsive_s: float = 30.0,
        skew_limit_s: float = 3600.0,
        connect: Callable[[str], RankStore] | None = None,
    ) -> None:
        members = _members(mesh, axis)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.domain = f"{axis if mesh else 'world'} {ranks_text(members)}"
        logger.rank = self.rank
        self.coordinate = members.index(self.rank)
        self.policy: Policy = policy
        self.hang_after_s, self.unresponsive_s, self.skew_limit_s = hang_after_s, unresponsive_s, skew_limit_s
        self.is_active, self.is_leaving = False, False
        self.findings: list[Verdict] = []
        """Red verdicts so far; more than one only with a policy that goes on."""
        self.timeline: list[tuple[float, str]] = []
        """(Unix time, what happened): compiles, alarms and verdicts of this rank."""
        self.left: dict[int, RankState] = {}
        """Ranks that closed their sentinel."""
        prefix = f"tpcompile/sentinel/{self.domain}/{next(_NUMBERS.setdefault(self.domain, itertools.count()))}"
        make = connect or self._connect
        self.channel = Channel(lambda: make(prefix), members)
        self.session = CaptureSession(groups=mesh_roles(mesh) if mesh else None, count_regions=False)
        self.follower, self.rounds, self.problems = Follower(self), Rounds(self), Problems(self)
        self.ending = Ending(self, allow=allow, kernels=kernels, run_dir=run_dir)
        self.clock = Clock(self.follower.tell_passed)
        self._compiling = Compiling(self)
        self.black_box = BlackBox()
        self.shutdown = Shutdown(last_act=self.black_box.close)
        self._main, self._pid = threading.get_ident(), os.getpid()
        self._settled = threading.Condition()
        self._open: set[Position] = set()
        """Positions at which this rank has compiled."""
        self._may_wait = True
        """False when a policy went on after ranks were found out of step."""
        self._free: set[Position] = set()
        """Positions whose code may run."""

    def __enter__(self) -> Sentinel:
        self.session.__enter__()
        self.black_box.open()
        self.channel.say_here(black_box=self.black_box.path)
        self._compiling.install()
        self.is_active = True
        _LIVE.add(self)
        self.follower.start()
        self.rounds.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        if error is not None and failed and self.is_active:
            self._raises(error)
        elif self.is_active:
            adapter.finish_device_work()  # what hangs on the GPU hangs while somebody watches
            self._wait_for_decisions()
        self.close(f"{type(error).__name__}: {error}" if failed else "finished")

    def _raises(self, error: BaseException) -> None:
        """An exception ends this process: its traceback first, then a finding; who raised first ends first."""
        text, known = self.shutdown.raises(error), len(self.findings)
        self.safely(lambda: self._keep(error, text))
        if self.shutdown.exit_code is None:
            self.problems.raised(error)
            self.wait_for_finding(known)
        if self.policy == "stop":
            self.safely(self.ending.let_the_first_go)

    def _keep(self, error: BaseException, text: str) -> None:
        is_first = self.channel.raises_first()
        if self.policy != "stop":
            return  # the job may go on
        self.ending.keep_traceback(text)
        if is_first:
            self.shutdown.tell_launcher(error)

    def close(self, why: str = "finished") -> None:
        """Stop watching: threads end, connections close, hooks go. The other ranks are told that this one left."""
        was_active, self.is_active = self.is_active, False
        self.is_leaving = was_active  # until the others know, they count on this rank
        _LIVE.discard(self)
        if not self.follower.has_started or os.getpid() != self._pid:
            return  # nothing of this is a forked child's
        self._compiling.remove()
        if was_active:
            state = state_of(self).model_copy(update={"ended": why, "waits_at": None})
            try:
                self.channel.tell("left", state=state.model_dump(mode="json"))
                if self.shutdown.unwinds:
                    self.channel.say_closed()
            except RuntimeError:
                logger.debug("the store was gone when the sentinel closed")
        self.rounds.close()
        self.follower.close()
        self.channel.close_client()
        self.black_box.close()
        self.session.__exit__(None, None, None)

    def watch(self, target: Any, *, name: str = "", uneven: str = "") -> Any:
        """`target`, a compiled callable or a module, as a region of its own; a module is changed in place and returned.

        Every region is watched anyway. A watched one has a name that all ranks share, is known to have been called even
        where it was never compiled, and may be declared `uneven`: its content may differ between ranks for that reason
        (tokens of an expert, say), its collectives may not.
        """
        region = self.clock.region(name or region_name(target))
        region.is_watched, region.reason_uneven = True, uneven
        return self._compiling.watched(target, region)

    @property
    def stats(self) -> Mapping[str, int]:
        """Counts so far: store operations, compiles, and calls by region."""
        calls = {f"calls of {name}": region.call for name, region in self.clock.regions.items()}
        return {"store operations": self.channel.num_operations, "compiles": self._compiling.num_compiles, **calls}

    # For the parts.

    def safely(self, act: Callable[[], None]) -> None:
        """A sentinel that cannot reach the store must not hurt the job."""
        try:
            act()
        except RuntimeError as error:
            self.degrade(f"the job's store is gone: {error}")

    def degrade(self, why: str) -> None:
        """Watch no longer, on no rank, and say so once; the job goes on as if there were no sentinel."""
        if not self.is_active:
            return
        self.is_active = False
        logger.warning("rank {}: the sentinel has stopped watching: {}", self.rank, why)
        with self._settled:
            self._settled.notify_all()
        with suppress(RuntimeError):  # half a sentinel would take this rank for one that does not answer
            self.channel.tell("degraded", why=f"on rank {self.rank}, {why}")

    def note(self, what: str) -> None:
        """Write into the timeline."""
        self.timeline.append((time.time(), what))

    def main_frame(self) -> FrameType | None:
        """Innermost Python frame of the thread that made the sentinel."""
        return adapter.main_thread_frame(self._main)

    def wait_for_verdict(self, position: Position) -> None:
        """On the compiling thread: until all ranks agree, or have settled that they go on."""
        with self._settled:
            region = self.clock.region(position.region)
            while self.is_active and self._may_wait and position not in self._free and not region.is_reported:
                self._settled.wait(timeout=1.0)  # in slices, so that Ctrl-C is heard

    def free(self, position: Position) -> None:
        """What was compiled there may run."""
        with self._settled:
            self._free.add(position)
            self._settled.notify_all()

    def expect(self, position: Position) -> None:
        """What was compiled there is compared with the other ranks."""
        with self._settled:
            self._open.add(position)

    def _wait_for_decisions(self) -> None:
        """Give a comparison that is under way a moment: a rank that has left takes no part in it."""
        with self._settled:
            self._settled.wait_for(lambda: self._open <= self._free or not self.is_active, timeout=_DECIDE_S)

    def wait_for_finding(self, known: int) -> None:
        """Give the ranks a moment to settle an alarm before this process ends; it had `known` findings before."""
        with self._settled:
            self._settled.wait_for(lambda: len(self.findings) > known or not self.is_active, timeout=_CLOSE_S)

    def settled(self, position: Position | None, verdict: Verdict | None, *, is_red: bool) -> None:
        """The ranks have a verdict, and the policy did not end the process."""
        if is_red and verdict is not None:
            self.findings.append(verdict)
        if position is not None:
            region = self.clock.region(position.region)
            region.is_reported = region.is_reported or is_red
        with self._settled:
            if position is not None:
                # Of a region that was reported nothing is compared any more: nobody would say that the rest may run.
                self._free |= {p for p in self._open if p == position or (is_red and p.region == position.region)}
                self._free.add(position)
            elif is_red:
                self._may_wait = False  # the ranks are not in step, and go on: none may wait for what does not come
            self._settled.notify_all()

    def _connect(self, prefix: str) -> RankStore:
        return RankStore.connect(prefix, rank=self.rank, world_size=self.world_size)


def _in_a_forked_child() -> None:
    """A worker of a data loader or of a pool is no rank: it has the parent's connections, and none of its threads."""
    for sentinel in _LIVE:
        sentinel.is_active = False
        sentinel.rounds.forget()
    _LIVE.clear()


os.register_at_fork(after_in_child=_in_a_forked_child)


def _members(mesh: DeviceMesh | None, axis: str) -> list[int]:
    """Global ranks that must compile alike."""
    if not dist.is_initialized():
        raise ConfigError("Sentinel needs a process group; call torch.distributed.init_process_group first")
    if mesh is None:
        return list(range(dist.get_world_size()))
    if axis not in (mesh.mesh_dim_names or ()):
        raise ConfigError(f"the mesh has no axis {axis!r}; it has {', '.join(mesh.mesh_dim_names or ()) or 'none'}")
    return sorted(dist.get_process_group_ranks(mesh.get_group(axis)))
