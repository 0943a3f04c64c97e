"""Guard lookups and compiles of this process -> its position (region, call, index), without store or lock.

A region is what the user compiled: a function or a module's class. `call` counts its calls, `index` counts frames
entered within the call, whether their guards hit, missed or did not exist yet. Ranks that run the same program pass the
same positions in the same order at any speed, so two positions of one region can be compared.

All of it runs on the thread that runs the compiled code, and costs a dictionary lookup; other threads only read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import time_ns
from types import CodeType

from tpcompile.evidence.iterables import last
from tpcompile.evidence.records import SkippedFrame, UserLine
from tpcompile.sentinel.counter_samples import COLLECTIVES, Counted, Samples
from tpcompile.sentinel.messages import COMPILES, COMPILING, RUNNING, Announcement, Position

_END = 1 << 30
"""Index of a call that has ended, after every frame that it could have entered."""
_LOOK_S = 0.05
"""How often a rank that is behind is asked where it is."""
_KEPT_CALLS = 1024
KEPT_VARIANTS = 256
Passed = Callable[[Announcement], None]
Counters = Callable[[], dict[str, int]]
"""Reads the counters of the program, see `loop_counters`."""


@dataclass(slots=True)
class Region:
    """One compiled callable of the user, and its calls so far."""

    name: str
    reason_uneven: str = ""
    """Declared reason why its content may differ between ranks; its collectives must not."""
    call: int = 0
    index: int = 0
    """Frames entered in the current call."""
    compiled: dict[tuple[int, int], str] = field(default_factory=dict)
    """(call, index) -> compile id."""
    num_issued: dict[tuple[int, int], int] = field(default_factory=dict)
    """(call, index) of a compile -> collectives that this rank had issued until then, outside of compiled code too."""
    ended: set[tuple[int, int]] = field(default_factory=set)
    """Positions whose compile has ended."""
    collectives: set[tuple[str, str]] = field(default_factory=set)
    """(frame, hash of its collectives) of all compiles."""
    num_collectives: int = 0
    """Number of collectives in the newest compile."""
    code: CodeType | None = None
    """Code of the user's function, if known."""
    stack: tuple[UserLine, ...] = ()
    """The user's frames of one of its calls, innermost last."""
    has_variants: bool = False
    """More than one variant is compiled, so the variant that each call hits is recorded."""
    ran: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=KEPT_VARIANTS))
    """(call, compile id of the variant that it hit), from the second variant on."""
    variants: dict[str, str] = field(default_factory=dict)
    """Compile id -> position of the compile, which is equal on all ranks; hashes differ for uneven shards."""
    first_calls: list[int] = field(default_factory=list)
    """The first call of each of its compiled callables, e.g. of a block of each layer."""
    is_dynamic: bool = False
    """One of its compiles has symbolic sizes."""
    sample_at: int = 1
    """The next call at which this rank's counters are recorded."""
    samples: Samples = field(default_factory=Samples)
    skipped: SkippedFrame | None = None
    """Code inside it that Dynamo skips, so that its parts are compiled."""
    calls_as_one: int = 0
    """Calls before `skipped` was set."""
    is_reported: bool = False
    """A divergence in it was reported and the policy continued: it is not compared again."""
    has_missed: bool = False
    """The last lookup missed, and no compile has begun since."""
    is_inside: bool = False
    """A call of a watched region has begun and not ended."""

    def num_between(self, num_issued: int) -> int:
        """How many of its compiles began after that many collectives, and before the next."""
        return list(self.num_issued.values()).count(num_issued)

    @property
    def line(self) -> UserLine | None:
        """The user's line of one of its calls."""
        return last(self.stack)

    @property
    def is_compared(self) -> bool:
        """False when its content may differ, or a difference was reported."""
        return not (self.reason_uneven or self.is_reported)

    @property
    def is_local(self) -> bool:
        """True where nothing that was compiled in it issues a collective; False before the first compile has ended."""
        return bool(self.ended) and self.num_collectives == 0

    @property
    def position(self) -> Position:
        """Current position of this rank in the region."""
        return Position(region=self.name, call=self.call, index=self.index)

    def keep(self, position: Position, compile_id: str) -> None:
        """Record a compile; from the second variant of the first frame on, the variant that a call hits is recorded."""
        self.variants[compile_id] = position.key
        if position.index == 0:
            self.ran.append((position.call, compile_id))
            self.has_variants |= len(self.ran) > 1


class Progress:
    """Counts lookups, and calls `passed` when this rank passed a position at which a different rank compiles."""

    def __init__(
        self, passed: Passed, *, clock: Callable[[], float] = time.monotonic, counters: Counters | None = None
    ) -> None:
        self._passed, self._clock, self._counters = passed, clock, counters or dict
        self.mark: Callable[[str, int], None] = lambda _region, _call: None
        """Told of every call, with its number."""
        self.pause_flow: Callable[[bool], None] = lambda _is_paused: None
        """A compiler runs functions of the user for its own ends: what it executes is no step of the program."""
        self.is_active = False
        """True while this process is watched."""
        self.regions: dict[str, Region] = {}
        self.current = self._nowhere = Region("?")
        """The region that was called last; before the first call a placeholder."""
        self.activity, self.compile_id = RUNNING, ""
        self.since = self._clock()
        self.waits_at: Position | None = None
        """Position at which it has compiled and waits for the other ranks."""
        self.reason = ""
        """The guard that failed last."""
        self.ticks = 0
        """Incremented with every event, so that the timer sees progress."""
        self.begun: deque[tuple[int, Region, int]] = deque(maxlen=_KEPT_CALLS)
        """(Unix time in ns, region, call) of the last calls, to match with the flight recorder's times."""
        self.pending: dict[str, list[Announcement]] = {}
        """Region -> announced compiles of other ranks that this rank has neither made nor passed."""
        self._lock = threading.Lock()

    @property
    def position(self) -> Position | None:
        """Position of this rank, None before the first call of a region."""
        return None if self.current is self._nowhere else self.current.position

    def region(self, name: str) -> Region:
        """The region of that name."""
        found = self.regions.get(name)
        if found is None:
            found = self.regions[name] = Region(name)
        return found

    def enter(self, region: Region, num_hits: int = 0) -> Region:
        """Begin a call of the region; `num_hits` is 1 when the lookup of its first frame has hit already."""
        if region.has_missed:
            self._leave_lookup(region)
        region.index = 0  # first, since the listener may read in between and must not see a later frame
        region.call = call = region.call + 1
        self.begun.append((time_ns(), region, call))
        region.index = num_hits
        self.current = region
        self.ticks += 1
        self.mark(region.name, call)
        if call >= region.sample_at:
            region.samples.keep(call, self._counters(), self._clock())
            region.sample_at = region.samples.next_call
        if self.pending:
            self._look(region)
        return region

    def leave(self, region: Region) -> None:
        """End a call of a watched region."""
        region.is_inside = False
        region.has_missed = False
        region.index = _END
        self.ticks += 1
        if self.pending:
            self._look(region)

    def lookup(self, hit: bool) -> None:
        """Record a guard lookup for a frame of the current region."""
        region = self.current
        self.ticks += 1
        if region is self._nowhere:
            return
        if region.has_missed:
            self._leave_lookup(region)
        if not hit:
            region.has_missed = True
            return
        region.index += 1
        if self.pending:
            self._look(region)

    def compile_starts(self, compile_id: str) -> Position:
        """Record that a frame of the current region is being compiled; returns its position."""
        if self.current is self._nowhere:
            self.enter(self.region(self._nowhere.name))
        region = self.current
        region.has_missed = False
        position = region.position
        region.compiled[position.place] = compile_id
        region.num_issued[position.place] = self._num_issued()
        region.index += 1
        self.set(COMPILING, compile_id)
        return position

    def set(self, activity: str, compile_id: str = "") -> None:
        """Set what this rank does now."""
        self.activity, self.compile_id = activity, compile_id
        self.since = self._clock()
        self.ticks += 1
        self.pause_flow(activity in COMPILES)

    def calls(self) -> dict[str, int]:
        """Region -> its calls so far; may be called from any thread."""
        return {name: region.call for name, region in list(self.regions.items())}

    def calls_begun(self) -> list[tuple[int, str, int]]:
        """(Unix time in ns, region, call) of the last calls; may be called from any thread."""
        return [(at_ns, region.name, call) for at_ns, region, call in self.begun.copy()]

    def counted(self, *, is_over: bool = False) -> dict[str, Counted]:
        """Recorded calls of each region whose calls must be the same on all ranks; may be called from any thread.

        The number of calls of code with symbolic sizes and without collectives may depend on the data of the rank.
        """
        known = [region for region in self.compared() if region.variants or region.skipped]
        return {region.name: _counted(region, is_over=is_over) for region in known}

    def compared(self) -> list[Region]:
        """Regions whose content is compared between ranks; may be called from any thread."""
        return [region for region in list(self.regions.values()) if region.is_compared]

    def compiled_until(self, position: Position, num_issued: int = 0) -> frozenset[str]:
        """Compile ids of the position's region, up to the position, or up to that number of collectives.

        By collectives, a compile that has not ended may be one after the position, of which nothing is known yet.
        """
        region = self.region(position.region)
        compiled = region.compiled.copy()
        places = [place for place in compiled if place <= position.place]
        if num_issued:
            ended = compiled.keys() & region.ended
            places = [place for place in ended if region.num_issued[place] <= num_issued]
        compile_ids = map(compiled.__getitem__, places)
        return frozenset(compile_id.strip("[]") for compile_id in compile_ids)

    def announce(self, found: Announcement) -> list[Announcement]:
        """Add a compile of a different rank; returns those that this rank passed. Called on the listener's thread."""
        region = self.region(found.position.region)
        with self._lock:
            self.pending.setdefault(region.name, []).append(found)
        return self._passes(region)

    def _leave_lookup(self, region: Region) -> None:
        # A miss that no compile followed: Dynamo gave up on the frame and runs it eagerly.
        region.has_missed = False
        region.index += 1
        self._look(region)

    def _look(self, region: Region) -> None:
        for found in self._passes(region):
            self._passed(found)

    def _passes(self, region: Region) -> list[Announcement]:
        """Announcements that this rank passed without compiling; those made or passed are no longer pending."""
        with self._lock:  # the listener and the main thread may both find it
            waiting = self.pending.get(region.name, [])
            not_made = [found for found in waiting if not _has_made(region, found)]
            ahead = [found for found in not_made if not self._has_passed(region, found)]
            if ahead:
                self.pending[region.name] = ahead
            else:
                self.pending.pop(region.name, None)
        return [found for found in not_made if found not in ahead]

    def _num_issued(self) -> int:
        """Collectives that this rank has issued in the groups that all watched ranks share."""
        counted = self._counters()
        return sum(number for name, number in counted.items() if name.startswith(COLLECTIVES))

    def _has_passed(self, region: Region, found: Announcement) -> bool:
        """True when this rank cannot make the compile any more.

        One rank may call a region without collectives more often than the others (an evaluation). Its calls then
        have different numbers, and the collectives that all ranks issue show where it is.
        """
        is_called = found.position.place < (region.call, region.index)
        return is_called and (found.num_issued == 0 or self.has_issued_more(found.num_issued))

    def comes_past(self, number: int, *, limit_s: float) -> bool:
        """Wait, on a thread of the sentinel, until this rank has issued more collectives; False if it does not."""
        deadline_s = time.monotonic() + limit_s
        while not (has_issued := self.has_issued_more(number)) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        return has_issued

    def has_issued_more(self, number: int) -> bool:
        """True once this rank has issued more than that many collectives; may be called from any thread."""
        return self._num_issued() > number


def _has_made(region: Region, found: Announcement) -> bool:
    """True when this rank has compiled there: at the same call, or as often between the same two collectives."""
    is_between = found.num_issued > 0 and region.num_between(found.num_issued) >= found.between
    return is_between or found.position.place in region.compiled


def _counted(region: Region, *, is_over: bool) -> Counted:
    has_collectives = region.num_collectives > 0
    is_free = region.is_dynamic and not has_collectives
    return Counted(
        region=region.name,
        stack=region.stack,
        has_collectives=has_collectives,
        calls=region.call if region.skipped is None else region.calls_as_one,
        skipped=region.skipped,
        samples={} if is_free else region.samples.by_call(),
        is_over=is_over,
    )
