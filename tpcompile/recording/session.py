"""Live compiles of this process -> `RankRecord`."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from types import FrameType
from typing import Any

import torch

from tpcompile.evidence.compiles import events as trace
from tpcompile.evidence.compiles.cached_lines import CODE_FROM_CACHE, with_current_stacks
from tpcompile.evidence.compiles.trace import compile_records
from tpcompile.evidence.records import CompileRecord, Item, PhaseCounters, RankRecord, RegionCount
from tpcompile.evidence.records.base import lines_of
from tpcompile.evidence.records.compile import nodes_of
from tpcompile.evidence.text.comments import stack_lines
from tpcompile.evidence.text.lines import own_lines
from tpcompile.fastpath import ban, selection
from tpcompile.fastpath.use import Seen, uses
from tpcompile.fusion.manifest_records import Manifest
from tpcompile.profiles import chosen
from tpcompile.recording.additions import Additions
from tpcompile.recording.foreign import Launches, foreign_ops
from tpcompile.recording.rank_reads import rank_reads
from tpcompile.recording.regions import RegionCounter
from tpcompile.torch_api import compiler as compat
from tpcompile.torch_api import generated, registrations
from tpcompile.torch_api import hooks as torch_hooks

OnCompile = Callable[[CompileRecord], None]


class CaptureSession:
    """Listens to every compile of this process while it is active.

    Use as a context manager; mark parts of the run with `phase`. Caches stay on: the structured trace has AOT graphs
    and generated code on a cache hit as well as on a miss.

        with CaptureSession() as session:
            with session.phase("train step"):
                compiled(x)
        record = session.record(rank=rank, world_size=world_size)

    `groups` maps process-group names to roles (`mesh_roles(mesh)`), so that groups compare by role and not by name.
    `step`, when set, is the step of the run that later compiles belong to.
    `on_compile` gets the record of each compile of a frame after it ends and before its code runs.
    `count_regions` counts the compiled regions that each call enters, a few microseconds per region.
    `records_fusion` records which kernels each graph became and why others were not fused (docs/fusion.md), which adds
    a tenth to the time of a compile; `manifest` then has them.
    """

    def __init__(
        self,
        *,
        groups: Mapping[str, str] | None = None,
        on_compile_start: Callable[[str], None] | None = None,
        on_compile: OnCompile | None = None,
        count_regions: bool = True,
        records_fusion: bool = False,
    ) -> None:
        self._events: list[trace.TraceEvent] = []
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        """Phase -> calls in it; phases in the order in which they began."""
        self._counted: Counter[tuple[str, str]] = Counter()
        """(phase, name of a counter of Dynamo) -> count."""
        self._last_counters: dict[str, int] = {}
        self._current = ""
        self._is_recording = True
        self.step: int | None = None
        self.before_event: Callable[[Mapping[str, Any]], None] | None = None
        """Called with the raw metadata of every event, on the compiling thread, before `step` is stamped on it."""
        self.after_event: Callable[[Mapping[str, Any]], None] | None = None
        """Called with the same metadata after the event was recorded."""
        self._on_start, self._on_compile = on_compile_start, on_compile
        self._regions = RegionCounter() if count_regions else None
        self._records_fusion = records_fusion
        self._launches = Launches()
        self._additions = Additions()
        self._ended_profiles: list[chosen.Choice] = []
        """Profiles of callables that were closed before this session."""
        self._stacks: compat.Stacks = {}
        self._with_graph: set[str] = set()
        """Compiles that made a graph."""
        self._stack = ExitStack()
        self._given_roles = dict(groups or {})
        self._environment: dict[str, str] = {}
        self._settings: dict[str, str] = {}
        self._roles: dict[str, str] = {}
        self._strings: dict[int, str] = {}

    def __enter__(self) -> CaptureSession:
        self.read_environment()
        self._ended_profiles = chosen.closed()
        self._last_counters = compat.dynamo_counters()
        self._stack.enter_context(compat.tracing(compat.TraceHandler(self._receive)))
        self._stacks = self._stack.enter_context(compat.users_lines())
        self._stack.enter_context(registrations.functions_noted())
        if self._records_fusion:
            from tpcompile.fusion.recorder import logged_manifests  # and Inductor's scheduler, which others do without

            self._stack.enter_context(logged_manifests())
        if self._regions is not None:
            self._stack.enter_context(torch_hooks.guard_lookups(self._looked_up))
        self._callbacks = self._stack.enter_context(ExitStack())
        self._callbacks.enter_context(torch_hooks.compile_callbacks(self._started, self._ended))
        return self

    def __exit__(self, *exc: object) -> None:
        self._snapshot()
        self._count()
        self._stack.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Compiles inside belong to phase `name`, and so does what Dynamo counts. A phase may repeat.

        What is outside of every phase belongs to the phase with an empty name.
        """
        outer = self._switch(name)
        self._calls.setdefault(name, 0)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: str) -> str:
        """Begin a phase, and return the one that was current until now."""
        self._count()
        ended, self._current = self._current, name
        return ended

    def _count(self) -> None:
        """What Dynamo counted since the last look belongs to the current phase."""
        now = compat.dynamo_counters()
        for key, count in now.items():
            self._counted[self._current, key] += count - self._last_counters.get(key, count)
        self._last_counters = now

    def read_environment(self) -> None:
        """Compare the settings of now with those of other ranks: for a program that changes them while it is built."""
        # Now and on this thread: torch keeps settings in context variables, and other threads see the defaults.
        self._environment = compat.environment()
        self._settings = compat.compile_config()

    def know_groups(self, roles: Mapping[str, str]) -> None:
        """Roles of groups that were made after the session was: process-group name -> role."""
        self._given_roles.update(roles)

    def reset_compiler(self) -> None:
        """Call `torch.compiler.reset()` and register the compile callbacks again, which it drops."""
        self._callbacks.close()
        torch.compiler.reset()
        self._callbacks.enter_context(torch_hooks.compile_callbacks(self._started, self._ended))

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """What is compiled and called inside is not part of the record: a rank may search alone."""
        self._is_recording = False
        try:
            yield
        finally:
            self._is_recording = True
            self._last_counters = compat.dynamo_counters()

    def count_call(self) -> None:
        """Count one call of the compiled program in the current phase."""
        self._calls[self._current] += 1

    def compiles(self) -> tuple[CompileRecord, ...]:
        """All compiles seen so far, in order of their first event."""
        self._snapshot()
        events = self._events_so_far()
        compiles = compile_records(events, roles=self._roles, strings=self._strings)
        return tuple(self._with_stacks(self._with_sources(compile_)) for compile_ in compiles)

    def compile(self, compile_id: str) -> CompileRecord:
        """The newest compile with this id; an empty record when nothing was logged for it."""
        wanted = compile_id.strip("[]")
        self._snapshot()
        events = []
        for event in self._events_so_far():
            if event.compile_id == wanted or event.name == "str":  # strings are shared by all compiles
                events.append(event)
        found = compile_records(events, roles=self._roles, strings=self._strings)
        return self._with_stacks(self._with_sources(found[-1])) if found else CompileRecord(compile_id=wanted)

    def manifest(self, *, phases: tuple[str, ...] = ("",)) -> Manifest:
        """Which kernels the graphs so far became, of phases that begin with one of these texts; empty unless fusion is
        recorded."""
        from tpcompile.fusion.recorder import manifest_of

        logged = [one for one in self._events_so_far() if one.name == trace.FUSION and one.phase.startswith(phases)]
        return manifest_of(logged, self._settings)

    def _with_sources(self, compile_: CompileRecord) -> CompileRecord:
        found = foreign_ops([compile_])
        if not found:
            return compile_
        return ban.with_sources(compile_, uses(found, self._seen(found)), self._launches.sources)

    def _with_stacks(self, compile_: CompileRecord) -> CompileRecord:
        """The compile, with the stacks of the lines that were traced from one place only."""
        places = {(line.file, line.line) for line in lines_of(compile_.dynamo_nodes)}
        stacks = [self._stacks[place] for place in sorted(places & self._stacks.keys())]
        traced = [{tuple(own_lines(stack_lines(text))) for text in texts} for texts in stacks]
        known = tuple(own for found in traced if len(found) == 1 for own in found if own)
        return compile_.changed(traced_from=known)

    def _events_so_far(self) -> list[trace.TraceEvent]:
        with self._lock:
            return list(self._events)

    def record(
        self,
        *,
        rank: int,
        world_size: int,
        domain: str = "tp",
        coordinate: int | None = None,
        coordinates: Mapping[str, int] | None = None,
        tp_size: int | None = None,
        tp_aware: Iterable[str] = (),
        facts: dict[str, Any] | None = None,
        job: str = "",
    ) -> RankRecord:
        """The record of this rank.

        `coordinate` is its place in the symmetry domain, by default its rank, `coordinates` that along each axis of the
        mesh; `tp_size` the number of ranks over which its tensors are sharded, by default all; `tp_aware` the custom
        ops, kernels, passes and backends that are declared right on a shard; `job` the identity on which the ranks
        agreed.
        """
        compiles = self.compiles()
        self._additions.note_kernels(thorough=True)
        judged = self.judged(compiles, tp_size=world_size if tp_size is None else tp_size, tp_aware=tp_aware)
        kernels = ban.sources(judged.uses, self._launches.sources) | selection.choices() | self._additions.environment()
        profiles = chosen.entries(without=self._ended_profiles)
        return RankRecord(
            rank=rank,
            world_size=world_size,
            domain=domain,
            coordinate=rank if coordinate is None else coordinate,
            coordinates=dict(coordinates or {}),
            environment=tuple(sorted({**self._environment, **kernels, **profiles}.items())),
            groups=tuple(sorted(self._roles.items())),
            compiles=compiles,
            counters=self.counters(compiles),
            regions=self.region_counts(),
            skipped=tuple(compat.failed_frames()),
            places=places(),
            refused_ops=judged.refused,
            fast_paths=tuple(sorted([*judged.statuses, *selection.statuses()])),
            facts=facts or {},
            host=socket.gethostname().partition(".")[0],
            job=job,
        )

    def judged(self, compiles: Iterable[CompileRecord], *, tp_size: int, tp_aware: Iterable[str] = ()) -> ban.Judged:
        """What became of the custom ops and Triton kernels in these compiles, and of the passes and backends that made
        their code; `record` has it of all."""
        compiles = tuple(compiles)
        found = foreign_ops(compiles)
        judged = [*found, *self._additions.items(compiles)]
        return ban.judge(judged, tp_size=tp_size, declared=set(tp_aware), seen=self._seen(found))

    def region_counts(self) -> tuple[RegionCount, ...]:
        """Compiled regions entered per call, by phase and compiled callable; empty when they are not counted."""
        return self._regions.counts() if self._regions is not None else ()

    def counters(self, compiles: tuple[CompileRecord, ...]) -> tuple[PhaseCounters, ...]:
        """Dynamo's counters per phase, with the recompiles found in the trace."""
        recompiles = _recompiles(compiles)
        if "" in recompiles:
            self._calls.setdefault("", 0)
        counted: dict[str, dict[str, int]] = defaultdict(dict)
        for (where, key), count in self._counted.items():
            counted[where][key] = count
        found = []
        for name, calls in self._calls.items():
            found.append(PhaseCounters(phase=name, calls=calls, recompiles=recompiles[name], **counted[name]))
        return tuple(found)

    def _seen(self, found: Iterable[Item]) -> Seen:
        """The stacks with which these were traced, by file and line, and the lines that launch kernels."""
        places = {(line.file, line.line) for line in lines_of(found)}
        traced = {place: set(map(stack_lines, self._stacks[place])) for place in places & self._stacks.keys()}
        return Seen(traced, self._launches.lines)

    def _snapshot(self) -> None:
        # Taken again at every use: groups can be destroyed, and the string table grows, before the record is made.
        # A group keeps the role that it had when it was first seen; an earlier group may be destroyed meanwhile.
        self._roles = {**compat.group_roles(), **self._roles, **self._given_roles}
        self._strings = compat.interned_strings()

    def _receive(self, metadata: dict[str, Any], payload: str | None) -> None:
        if not self._is_recording:
            return
        if self.before_event is not None:
            self.before_event(metadata)
        found = trace.event(metadata, payload, phase=self._current, step=self.step)
        if found is not None:
            event = self._launches.named(found)
            if event.name == "dynamo_output_graph":
                self._additions.note(event.compile_id)
            with self._lock:
                self._events.append(event)
                if event.name == "dynamo_output_graph" and event.compile_id is not None:
                    self._with_graph.add(event.compile_id)
                if event.name == "dynamo_start":
                    self._events.append(
                        trace.event_beside(event, trace.CALLED_FROM, compat.program_lines(sys._getframe()))
                    )
                if event.name in trace.TRACED:
                    reads = rank_reads(compat.traced_code())
                    self._events.append(trace.event_beside(event, trace.RANK_READS, reads))
        if self.after_event is not None:
            self.after_event(metadata)

    def _started(self, compile_id: str) -> None:
        if self._on_start and self._is_recording:
            self._on_start(compile_id)

    def _looked_up(self, hit: bool, frame: FrameType | None = None) -> bool:
        if hit and self._regions is not None and self._is_recording:
            self._regions.entered(frame or sys._getframe(1), phase=self._current)
        return hit

    def _renew_lines(self, compile_id: str) -> None:
        """Give code from a cache the lines of this program; it has those of the program that filled the cache."""
        wanted = compile_id.strip("[]")
        events = [event for event in self._events_so_far() if event.compile_id == wanted]
        if CODE_FROM_CACHE.isdisjoint(event.name for event in events):
            return
        dynamo = self.compile(compile_id).graphs_of("dynamo")
        places = {(line.file, line.line) for line in lines_of(nodes_of(dynamo))}
        traced = set(chain.from_iterable(self._stacks[place] for place in places & self._stacks.keys()))
        for event in events:
            if event.name == "inductor_output_code":
                path = str(event.metadata[event.name].get("file_path", ""))
                generated.replace_stacks(path, lambda stacks: with_current_stacks(stacks, traced))

    def _ended(self, compile_id: str) -> None:
        if not self._is_recording:
            return
        self._renew_lines(compile_id)
        if self._regions is not None and compile_id in self._with_graph:
            self._regions.entered(sys._getframe(), phase=self._current, compile_id=compile_id)
        if self._on_compile is not None:
            self._on_compile(self.compile(compile_id))


def _recompiles(compiles: Iterable[CompileRecord]) -> Counter[str]:
    """Phase -> number of recompiles, of every phase in which something was compiled."""
    found: Counter[str] = Counter()
    for compile_ in compiles:
        is_first = compile_.compile_id.endswith("/0")
        found[compile_.phase] += not is_first
    return found


def places() -> dict[str, int]:
    """Local rank and device index of this process, as far as they are set."""
    places: dict[str, int] = {}
    local_rank = os.environ.get("LOCAL_RANK", "")
    if local_rank.isdigit():
        places["local rank"] = int(local_rank)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        places["device index"] = torch.cuda.current_device()
    return places
