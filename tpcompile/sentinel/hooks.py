"""Guard lookups and compiles of this process -> progress, and events for the protocol; on the thread that compiles.

Runs inside Dynamo, so it must neither raise nor be slow: a hit is counted in about a microsecond, and only a compile is
an event.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

from tpcompile.evidence.iterables import last
from tpcompile.evidence.records import CompileRecord
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.reasons import nearest_reason
from tpcompile.recording import CaptureSession
from tpcompile.sentinel import flight
from tpcompile.sentinel.checks import reason_of
from tpcompile.sentinel.entries import Entries
from tpcompile.sentinel.events import CompileEnded, CompileStarted, Event
from tpcompile.sentinel.messages import RUNNING, TRIGGERS, Announcement, Position, post_of
from tpcompile.sentinel.progress import Progress, Region
from tpcompile.sentinel.timeline import TimelineEvent
from tpcompile.torch_api import compiler as compat
from tpcompile.torch_api import hooks as torch_hooks
from tpcompile.torch_api import watching


class Hooks:
    """Callbacks for torch's guard lookups and compiles."""

    def __init__(
        self,
        rank: int,
        session: CaptureSession,
        progress: Progress,
        *,
        on: Callable[[Event], None],
        note: Callable[[TimelineEvent, str], None],
        say_raising: Callable[[], None],
        on_compile: Callable[[CompileRecord], None],
    ) -> None:
        self._rank, self._session, self._progress = rank, session, progress
        self._on, self._note, self._say_raising = on, note, say_raising
        self._on_compile = on_compile
        self._listener = torch_hooks.CompileListener(self._while_watched(self._starts), self._ends)
        self._positions: dict[str, Position] = {}
        self._entries = Entries()
        self._regions: dict[int, Region] = {}
        """Region of every compiled function that is alive, by its id."""
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._failed: set[str] = set()
        """Compiles that raised; torch logs their end, with the reason, after the callback."""
        self._handled: BaseException | None = None
        """The exception the program was handling when the compile began."""
        self.num_compiles = 0

    def install(self) -> None:
        """Register the callbacks."""
        torch_hooks.lookups.add(self._looked_up)
        self._listener.ensure()
        self._session.before_event = self._while_watched(self._logged)
        self._session.after_event = self._while_watched(self._has_logged)

    def remove(self) -> None:
        """Remove the callbacks."""
        torch_hooks.lookups.remove(self._looked_up)
        self._entries.clear()
        self._listener.close()
        self._session.before_event = self._session.after_event = None

    def watched(self, target: Any, region: Region) -> Any:
        """`target` with its calls counted as calls of the region."""

        def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                if region.is_inside or not self._progress.is_active:
                    return call(*args, **kwargs)
                region.is_inside = True
                self._progress.enter(region)
                try:
                    return call(*args, **kwargs)
                finally:
                    self._progress.leave(region)

            return counted

        return watching.wrap_calls(target, wrap)

    def _while_watched(self, act: Callable[..., None]) -> Callable[..., None]:
        """`act`, which does nothing once the process is no longer watched."""

        def acts(*args: Any) -> None:
            if self._progress.is_active:
                act(*args)

        return acts

    def _looked_up(self, hit: bool, frame: FrameType | None = None) -> bool:
        """Called after every guard lookup; in steady state an entry hook has recorded which region begins."""
        progress, begun = self._progress, self._entries.begun
        if not progress.is_active:
            return hit
        region = begun.pop(get_ident(), None) if begun else None
        if region is not None and hit and not progress.current.is_inside:
            self._enters_compiled(region)
        else:
            self._counts(hit, frame or sys._getframe(1))
        return hit

    def _counts(self, hit: bool, frame: FrameType) -> None:
        """Count a lookup without an entry hook: the stack shows whether a call begins with it."""
        if not hit:
            self._entries.clear()
        region = None if self._progress.current.is_inside else self._entered(frame, hit=hit)
        if region is not None and hit:
            self._enters_compiled(region)
            return
        if region is not None:
            self._progress.enter(region)
        self._progress.lookup(hit)

    def _enters_compiled(self, region: Region) -> None:
        """Begin a call whose first frame is compiled already, and record the variant that it hit."""
        self._progress.enter(region, 1)
        if region.has_variants and region.code is not None:
            region.ran.append((region.call, watching.variant_hit(region.code)))

    def _entered(self, frame: FrameType | None, *, hit: bool) -> Region | None:
        """The region whose call begins with the frame below `frame`; on a hit its callable gets an entry hook."""
        call = watching.entered(frame)
        if call is None:
            return None
        self._entries.saw(call)
        region = self._regions.get(id(call.function)) or self._named(call, frame)
        if hit:
            self._entries.add(call, region)
        return region

    def _enter_from(self, frame: FrameType | None) -> None:
        """Begin a call when the frame below is the compiled callable's own, unless its wrapper has done so."""
        if self._progress.current.is_inside:
            return
        region = self._entered(frame, hit=False)
        if region is not None:
            self._progress.enter(region)

    def _named(self, call: watching.Entered, frame: FrameType | None) -> Region:
        """The region of a callable; the name is computed once per function."""
        function, code = call.function, code_of(call.target)
        region = self._progress.region(region_name(call.target))
        if region.code is None and code is not None:
            region.code, region.stack = code, flight.user_stack(frame)
            region.has_variants = watching.num_variants(code) > 1
        key = id(function)
        with suppress(TypeError):  # without weak references the name is computed every time
            self._alive[key] = weakref.ref(function, lambda _: self._forget(key))
            self._regions[key] = region
            region.first_calls.append(region.call + 1)
        return region

    def _forget(self, key: int) -> None:
        """Remove a function that was freed: a new one may get its id."""
        self._regions.pop(key, None)
        self._alive.pop(key, None)

    def _logged(self, metadata: Mapping[str, Any]) -> None:
        """Set the step of an event before torch logs it. A first compile has no lookup before its start is logged."""
        if "dynamo_start" in metadata:
            self._entries.clear()
        if "dynamo_start" in metadata and not metadata.get("attempt"):
            self._listener.ensure()  # torch.compiler.reset() forgets callbacks, not log handlers
            self._enter_if_new(sys._getframe(1))
        self._session.step = self._progress.current.call or None

    def _enter_if_new(self, frame: FrameType | None) -> None:
        """Begin a call, unless the lookup that missed has done so."""
        if not self._progress.current.has_missed:
            self._enter_from(frame)

    def _starts(self, kind: str, compile_id: str) -> None:
        if kind != "dynamo":
            self._progress.set(TRIGGERS.get(kind, kind), compile_id)
            return
        self._handled = sys.exception()  # the program compiles in an `except` block
        self._note(TimelineEvent.COMPILE_STARTS, compile_id)
        self.num_compiles += 1
        self._begin(compile_id)

    def _begin(self, compile_id: str) -> None:
        self._keep_skipped(sys._getframe(1))
        position = self._positions[compile_id] = self._progress.compile_starts(compile_id)
        begun = self._session.compile(compile_id)
        self._progress.reason = reason_of(begun).guard
        reason = nearest_reason(begun.recompile_reasons)
        line = last(flight.user_stack(sys._getframe(1)))
        region = self._progress.region(position.region)
        found = Announcement(
            rank=self._rank,
            position=position,
            compile_id=compile_id,
            reason=reason,
            line=line,
            num_issued=region.num_issued[position.place] if region.is_local else 0,
            between=region.num_between(region.num_issued[position.place]),
        )
        self._on(CompileStarted(found))

    def _keep_skipped(self, frame: FrameType | None) -> None:
        """If this compiles a part of a callable whose own code Dynamo skips, record the skipped code."""
        call = compat.compiled_call(frame)
        if call is None or call.around is None:
            return
        outer = watching.entered(call.around.f_back)
        if outer is None:
            return
        region = self._progress.region(region_name(outer.target))
        skipped = watching.skipped_code(call.around)
        if skipped is not None and region.skipped is None:
            region.skipped, region.calls_as_one = skipped, region.call

    def _ends(self, kind: str, compile_id: str) -> None:
        handled, self._handled = self._handled, None  # it keeps alive all tensors of the frames that it passed
        if not self._progress.is_active:
            return
        self._progress.set(RUNNING)
        self._note(TimelineEvent.COMPILE_ENDS, compile_id)
        if kind != "dynamo" or compile_id not in self._positions:
            return
        error = sys.exception()
        if error is None or error is handled:
            self._failed.discard(compile_id)  # an earlier attempt may have raised
            self._ended(compile_id, may_wait=True)
            return
        self._failed.add(compile_id)
        if not watching.swallows_errors():
            self._say_raising()

    def _has_logged(self, metadata: Mapping[str, Any]) -> None:
        """torch logged the end of a compile, including one that failed or that the recompile limit prevented."""
        if "compilation_metrics" not in metadata:
            return
        compile_id = f"{metadata.get('frame_id')}/{metadata.get('frame_compile_id')}"
        if compile_id not in self._positions and self._session.compile(compile_id).limit_reached:
            self._enter_if_new(sys._getframe(1))
            self._begin(compile_id)
            self._progress.set(RUNNING)
            self._failed.add(compile_id)
        if compile_id in self._failed:
            self._failed.discard(compile_id)
            self._ended(compile_id, may_wait=False)

    def _ended(self, compile_id: str, *, may_wait: bool) -> None:
        position, compile_ = self._positions[compile_id], self._session.compile(compile_id)
        region = self._progress.region(position.region)
        post = post_of(self._rank, compile_, is_uneven=bool(region.reason_uneven))
        region.keep(position, compile_id)
        region.is_dynamic |= is_dynamic(compile_)
        self._on_compile(compile_)
        self._on(CompileEnded(position, post, may_wait))


def is_dynamic(compile_: CompileRecord) -> bool:
    """True when sizes of its inputs are symbolic."""
    inputs = [node.value for node in compile_.dynamo_nodes if node.op == "placeholder"]
    return any(value.startswith("Sym(") for value in inputs)


def code_of(target: Any) -> CodeType | None:
    """Code of the user's function, or of a module's forward."""
    return getattr(_function_of(target), "__code__", None)


def region_name(target: Any) -> str:
    """Name of a compiled function or module, with the line of its code; equal on all ranks."""
    code = code_of(target)
    name: str = getattr(_function_of(target), "__qualname__", type(target).__qualname__)
    return f"{name} {normalise.short_path(code.co_filename)}:{code.co_firstlineno}" if code else name


def _function_of(target: Any) -> Any:
    """The user's function: that of a module is the `forward` of its class, whatever wraps it."""
    if hasattr(type(target), "forward"):
        return getattr(type(getattr(target, "_orig_mod", target)), "forward", None)
    return getattr(target, "__wrapped__", target)
