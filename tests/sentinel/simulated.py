"""N protocols over one simulated log, under virtual time: a seeded scheduler decides who moves next."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpcompile.evidence.records import UserLine
from tpcompile.sentinel import events as ev
from tpcompile.sentinel.asking import Limits
from tpcompile.sentinel.counter_samples import COLLECTIVES, Counted
from tpcompile.sentinel.hang import calls_parted
from tpcompile.sentinel.messages import RUNNING, WAITING, Announcement, CompilePost, Issued, Position, RankState
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.protocol import Protocol

GROUP = "0 default_pg"
_TICK_S, _ANSWER_S, _LEAVE_S = 0.5, 2.0, 2.0
_LIMIT_S, _LIMIT_MOVES = 200.0, 20_000
Blocked = Callable[[], bool]


@dataclass(frozen=True)
class Call:
    """A call of a compiled region; a variant that is new on the rank is compiled first."""

    region: str
    variant: str = "a"
    num_collectives: int = 1
    content: str = ""
    """What the compile makes; empty for the same on all ranks."""
    line: int = 10
    compile_s: float = 0.1
    step: int = 0
    """Iteration of the loop around it."""


@dataclass(frozen=True)
class Eager:
    """A collective outside of compiled code."""

    line: int


@dataclass(frozen=True)
class Die:
    """The process ends without a message."""


@dataclass(frozen=True)
class Pause:
    """The rank does something else."""

    seconds: float


Op = Call | Eager | Die | Pause


@dataclass(frozen=True)
class Verdict:
    """What ended the job."""

    ranks: tuple[int, ...]
    what: str


@dataclass
class Store:
    """What the ranks share."""

    entries: list[tuple[str, int, Any]] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    posts: dict[Position, CompilePost] = field(default_factory=dict)
    differs: set[Position] = field(default_factory=set)
    answers: dict[tuple[int, int], RankState] = field(default_factory=dict)
    counted: dict[int, dict[str, Counted]] = field(default_factory=dict)
    arrived: dict[int, set[int]] = field(default_factory=dict)
    """Number of a collective -> ranks that issued it."""

    def is_first(self, what: str) -> bool:
        self.counters[what] += 1
        return self.counters[what] == 1


class Rank:
    """One process: the effects that a protocol asks for, and a program."""

    def __init__(self, job: Job, rank: int, program: Sequence[Op]) -> None:
        self.job, self.rank, self.store = job, rank, job.store
        self.progress = Progress(
            lambda found: self.on(ev.WentPast(found)), clock=lambda: job.now_s, counters=self._counters
        )
        self.progress.is_active = True
        limits = Limits(hang_after_s=1.0, stopped_s=4.0, unresponsive_s=5.0)
        self.protocol = Protocol(rank, range(job.num_ranks), self.progress, limits)
        self.issued: list[Issued] = []
        self.contents: dict[Position, str] = {}
        self.line = self.step = 0
        self.is_dead = self.has_left = self.has_heard_itself_leave = False
        self.heard = 0
        self.next_tick_s = job.draw.uniform(0, _TICK_S)
        self.question: tuple[int, tuple[int, ...], float] | None = None
        self.late: list[tuple[float, ev.Event]] = []
        self.wait: Blocked = lambda: True
        self._main = self._run(program)

    # Threads.

    def can_move(self) -> list[Callable[[], None]]:
        """What may happen next in this process."""
        if self.is_dead:
            return []
        moves: list[Callable[[], None]] = []
        if not self.has_left and self.wait():
            moves.append(self._step)
        if self.heard < len(self.store.entries) and not self.has_heard_itself_leave:
            moves.append(self._hear)
        if not self.has_left and self.job.now_s >= self.next_tick_s:
            moves.append(self._tick)
        return moves

    def wakes_at_s(self) -> float:
        """When its timer moves next."""
        return float("inf") if self.is_dead or self.has_left else self.next_tick_s

    def _step(self) -> None:
        self.wait = lambda: True
        try:
            self.wait = next(self._main)
        except StopIteration:
            self.has_left = True

    def _hear(self) -> None:
        kind, rank, data = self.store.entries[self.heard]
        self.heard += 1
        self.has_heard_itself_leave |= (kind, rank) == ("left", self.rank)
        self.on(data if kind != "alarm" else ev.AlarmHeard(data))

    def _tick(self) -> None:
        self.next_tick_s = self.job.now_s + _TICK_S
        due = [event for at_s, event in self.late if at_s <= self.job.now_s]
        self.late = [(at_s, event) for at_s, event in self.late if at_s > self.job.now_s]
        for event in due:
            self.on(event)
        if self.question is None:
            self.on(ev.Tick(self.job.now_s))
        else:
            self._collect()

    def _collect(self) -> None:
        assert self.question is not None
        number, expected, deadline_s = self.question
        states = {rank: self.store.answers[number, rank] for rank in expected if (number, rank) in self.store.answers}
        absent = {rank: ev.Absence(self.job.process(rank)) for rank in expected if rank not in states}
        living = [rank for rank, found in absent.items() if found.how != "dead"]
        if not living or self.job.now_s > deadline_s:
            self.question = None
            self.on(ev.Answers(self.job.now_s, states, absent))

    # The program.

    def _run(self, program: Sequence[Op]) -> Iterator[Blocked]:
        for op in program:
            yield lambda: True
            if isinstance(op, Die):
                self.is_dead = True
                yield lambda: False
            elif isinstance(op, Pause):
                yield self._until(op.seconds)
            elif isinstance(op, Eager):
                yield from self._collective(op.line, None)
            else:
                yield from self._call(op)
        deadline_s = self.job.now_s + _LEAVE_S
        yield lambda: self.protocol.has_decided_all() or self.job.now_s > deadline_s
        self.on(ev.Leaving())
        left = self.state().model_copy(update={"ended": "finished", "waits_at": None})
        self.store.entries.append(("left", self.rank, ev.PeersLeft({self.rank: left})))

    def _call(self, op: Call) -> Iterator[Blocked]:
        self.line, self.step = op.line, op.step
        progress, region = self.progress, self.progress.region(op.region)
        progress.enter(region)
        known = f"{op.region}/{op.variant}"
        is_hit = known in self.job.compiled[self.rank]
        progress.lookup(is_hit)
        if not is_hit:
            self.job.compiled[self.rank].add(known)
            yield from self._compile(op, known)
        for _ in range(op.num_collectives):
            yield from self._collective(op.line, (op.region, region.call))

    def _compile(self, op: Call, compile_id: str) -> Iterator[Blocked]:
        position = self.progress.compile_starts(compile_id)
        self.contents[position] = op.content
        self.on(ev.CompileStarted(Announcement(rank=self.rank, position=position, compile_id=compile_id)))
        yield self._until(op.compile_s * self.job.draw.random())
        self.progress.set(RUNNING)
        post = CompilePost(
            rank=self.rank, frame=op.region, program=op.content, collectives=str(op.num_collectives), lowered="",
            num_collectives=op.num_collectives,
        )  # fmt: skip
        self.progress.region(position.region).variants[compile_id] = op.content
        self.on(ev.CompileEnded(position, post, True))
        yield lambda: self.progress.waits_at is None or not self.protocol.must_wait(position)
        if self.progress.waits_at is not None:
            self.progress.waits_at = None
            self.progress.set(RUNNING)

    def _collective(self, line: int, call: tuple[str, int] | None) -> Iterator[Blocked]:
        self.line = line
        at = UserLine(file="train.py", line=line)
        number = len(self.issued) + 1
        region, count = call or ("", 0)
        one = Issued(
            group=GROUP, seq=number, op="all_reduce", is_done=False, stack=(at,),
            call_line=at if call else None, region=region, call=count,
        )  # fmt: skip
        self.issued.append(one)
        arrived = self.store.arrived.setdefault(number, set())
        arrived.add(self.rank)
        yield lambda: len(arrived) == self.job.num_ranks
        self.issued[-1] = one.model_copy(update={"is_done": True})

    def _counters(self) -> dict[str, int]:
        return {"`step` in main": self.step, f"{COLLECTIVES}{GROUP}": len(self.issued)}

    def _until(self, seconds: float) -> Blocked:
        end_s = self.job.now_s + seconds
        return lambda: self.job.now_s >= end_s

    # Effects.

    def on(self, event: ev.Event) -> None:
        for action in self.protocol.on(event):
            self._do(action)

    def _do(self, action: ev.Action) -> None:
        store, entries = self.store, self.store.entries
        match action:
            case ev.Announce(found):
                if store.is_first(f"first/{found.position.key}"):
                    entries.append(("compile", self.rank, ev.PeerCompiled(found)))
            case ev.Post(position, post):
                self._post(position, post)
            case ev.Wait(position):
                self.progress.waits_at = position
                self.progress.set(WAITING)
            case ev.DecideEqual(position):
                self._decide(position, ev.Decided(position))
            case ev.TellPassed(position):
                self._decide(position, ev.PeerPassed(position, self.state()))
            case ev.RaiseAlarm(position):
                entries.append(("alarm", self.rank, ev.Alarm(key=position.key, position=position)))
            case ev.RaiseOneRank(position, theirs):
                parted = calls_parted(self.state(), theirs)
                ranks = parted.ranks if parted else (self.rank,)
                self.job.ends(ranks, parted.observed if parted else f"one rank compiled at {position}")
            case ev.RaiseFinding(finding):
                self.job.ends(finding.ranks, finding.observed)
            case ev.Later(after_s, event):
                self.late.append((self.job.now_s + after_s, event))
            case ev.Answer(number):
                store.answers[number, self.rank] = self.state()
            case ev.Look():
                self.on(ev.Looked(self.job.now_s, bool(self.issued) and not self.issued[-1].is_done))
            case ev.Ask(expected):
                self._ask(expected)
            case ev.Settle(alarm, present):
                self._settle(alarm, present)
            case ev.Compare():
                self._compare()
            case ev.StopWatching(why):
                raise AssertionError(why)

    def _post(self, position: Position, post: CompilePost) -> None:
        first = self.store.posts.setdefault(position, post)
        if first.model_copy(update={"rank": self.rank}) != post:
            self.store.differs.add(position)
        self.store.counters[f"posted/{position.key}"] += 1
        is_last = self.store.counters[f"posted/{position.key}"] == self.job.num_ranks
        self.on(ev.Posted(position, is_last, position not in self.store.differs))

    def _decide(self, position: Position, event: ev.Event) -> None:
        if self.store.is_first(f"decided/{position.key}"):
            self.store.entries.append(("decision", self.rank, event))

    def _ask(self, expected: tuple[int, ...]) -> None:
        self.store.counters["asks"] += 1
        number = self.store.counters["asks"]
        self.store.entries.append(("ask", self.rank, ev.Asked(self.rank, number)))
        self.question = (number, expected, self.job.now_s + _ANSWER_S)

    def _compare(self) -> None:
        """Publish what ran, and read what the next rank has published."""
        counted, theirs = self.store.counted, (self.rank + 1) % self.job.num_ranks
        counted[self.rank] = self.progress.counted()
        known = {rank: counted[rank] for rank in (self.rank, theirs) if rank in counted}
        self.on(ev.Compared({}, known))

    def _settle(self, alarm: ev.Alarm, present: tuple[int, ...]) -> None:
        assert alarm.position is not None
        contents = {rank: self.job.ranks[rank].contents.get(alarm.position) for rank in present}
        usual = Counter(contents.values()).most_common(1)[0][0]
        odd = tuple(rank for rank, content in contents.items() if content != usual)
        if odd:
            self.job.ends(odd, f"the content differs at {alarm.position}")
        else:
            self.on(ev.Settled(alarm.position, is_red=False))

    def state(self) -> RankState:
        progress = self.progress
        return RankState(
            rank=self.rank,
            activity=progress.activity,
            since_s=self.job.now_s - progress.since,
            position=progress.position,
            waits_at=self.protocol.waits_at(),
            blocked=bool(self.issued) and not self.issued[-1].is_done,
            stack=(UserLine(file="train.py", line=self.line),),
            issued=tuple(self.issued),
            calls=progress.calls(),
            groups=(GROUP,),
            members={GROUP: tuple(range(self.job.num_ranks))},
        )


class Job:
    """A history: runs until all ranks have ended, a verdict is found, or nothing can move any more."""

    def __init__(self, programs: Sequence[Sequence[Op]], seed: int) -> None:
        self.draw = random.Random(seed)
        self.now_s, self.num_ranks = 0.0, len(programs)
        self.store = Store()
        self.compiled: list[set[str]] = [set() for _ in programs]
        self.verdict: Verdict | None = None
        self.ranks = [Rank(self, rank, program) for rank, program in enumerate(programs)]

    def ends(self, ranks: tuple[int, ...], what: str) -> None:
        """The first verdict counts."""
        self.verdict = self.verdict or Verdict(ranks, what)

    def process(self, rank: int) -> str:
        """What the operating system says of a process."""
        return "dead" if self.ranks[rank].is_dead else "alive"

    def run(self) -> Verdict | None:
        """The verdict, None when all ranks ended in peace. A deadlock is an AssertionError."""
        for _ in range(_LIMIT_MOVES):
            if self.verdict is not None or all(rank.has_left for rank in self.ranks):
                return self.verdict
            moves = [move for rank in self.ranks for move in rank.can_move()]
            if moves:
                self.draw.choice(moves)()
            else:
                self.now_s = self._next_s()
            assert self.now_s < _LIMIT_S, "no rank has ended and no verdict was found"
        raise AssertionError("the ranks never stop sending")

    def _next_s(self) -> float:
        timer_s = min(rank.wakes_at_s() for rank in self.ranks)
        return max(self.now_s + 0.05, min(timer_s, self.now_s + _TICK_S))
