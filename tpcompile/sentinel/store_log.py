"""Messages of the sentinel <-> keys of the job's store; one client per thread, operations are counted.

    here/<rank>             pid, host and black box of a rank, once
    events, event/<n>       a log; every listener blocks on its next entry
    heard/<n>, swept        counters: ranks that have heard a batch of entries, and batches that are deleted
    first/<position>        counter: the first to compile there announces it
    post/<position>         hashes of the first rank that finished; all other ranks compare with them
    posted/<position>       counter: how many have finished
    differs/<position>      set when a rank's post differs from the first one
    decided/<position>      counter: the first verdict on a position becomes an event, later ones are dropped
    state/<ask>/<rank>      answer to an `ask` event; a rank keeps its last ones
    more/<rank>/<n>         what a rank called since the last time, for its neighbour, who deletes it
    called/<rank>           what a rank called, when it leaves
    ran/...                 hash of the variants that the ranks ran, and whether all are equal, when they leave
    agreed/...              see `agreed_board`
    left, left/<rank>       how many ranks have left, and what each did last; over: how many read no more
    raised                  the first rank that raised an exception
    closed/<rank>           set when a rank that raised sends nothing more
    terminated/<rank>       when a rank received SIGTERM, Unix time
    failed/<rank>           state of a rank in which communication failed, or that received SIGTERM
    waiting/<n>/<rank>      shared by all domains: state of a rank that waits for ranks of a different domain
    waiting/<n>/run_dir     shared by all domains: the directory of the reports, by time and number
    waiting/<n>/problem     likewise: the first problem for which a domain ends the job
    waiting/<n>/found/<k>   likewise: what domains end the job for; reports, reported: the one that reports it

Calls of compiled code write no key; the timer writes `more`. A position is (region, call, index), see `progress`. What
is written for a position is deleted when all ranks have compiled the same there, entries when all have heard them, and
the rest when all have left: a healthy job leaves nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tpcompile.evidence.records import Check
from tpcompile.evidence.records.bounds import Rank, Seconds
from tpcompile.evidence.text.ranks import exact_ranks, is_among
from tpcompile.evidence.timeline.flow import Flow
from tpcompile.ranks.liveness import host_name, this_host
from tpcompile.ranks.run_dir import agreed_job, agreed_run_dir
from tpcompile.ranks.store import Budget, RankStore
from tpcompile.sentinel.agreed_board import agreed_keys
from tpcompile.sentinel.called import Called, Table
from tpcompile.sentinel.deadlock import Seen
from tpcompile.sentinel.left_ranks import LeftRanks
from tpcompile.sentinel.log_entries import AnyEntry, Ask, CompileBegins, Entry, Left, Settled
from tpcompile.sentinel.messages import FINISHED, RUNNING, Announcement, CompilePost, Position, RankState
from tpcompile.sentinel.process import Process
from tpcompile.sentinel.published import published, reachable, waited_for

E = TypeVar("E", bound=Entry)
Connect = Callable[[], RankStore]
_TOGETHER_S, _MAX_ROUNDS = 0.5, 4
"""Time in which ranks that finish share an entry of the log, and how often a rank waits for the entry of another."""
_FOREVER_S = 365 * 86400.0
_OF_DOMAIN = (
    "ran/first", "ran/differs", "ran/posted", "ran/complete", "ran/judged", "events", "asks", "swept", "left",
    "over",
)  # fmt: skip
_BATCH = 32
"""Entries that are deleted together: a counter for each would cost more than they do."""
_ANSWERS = 8
"""Answers of a rank that are kept: so many ranks may ask before one of them has read what it asked for.

A job that waits now and then asks thousands of times; a rank whose answer is missed counts as silent until the next.
"""
_UNREAD = 4
"""Differences that a neighbour may leave unread before this rank waits with the next one."""
_MAX_CALLED_BYTES = 64 << 20
"""What a rank reads at most of what the others called."""


class StoreLog:
    """The store of one rank. Each thread gets its own client, since a blocking wait blocks the whole client."""

    def __init__(self, connect: Connect, members: Sequence[int], *, domain: str, number: int) -> None:
        self._connect, self._log, self._board = connect, f"{domain}/{number}", f"waiting/{number}"
        self.members = tuple(members)
        self._clients = threading.local()
        self._lock = threading.Lock()
        self.num_operations = 0
        """Store operations of this rank so far."""
        self.rank, self.world_size = self._client().rank, self._client().world_size

    def _client(self) -> RankStore:
        client: RankStore | None = getattr(self._clients, "store", None)
        if client is None:
            self._clients.all = self._connect()
            client = self._clients.store = self._clients.all.under(self._log)
        return client

    def _count(self, operations: int) -> RankStore:
        with self._lock:
            self.num_operations += operations
        return self._client()

    def close_client(self) -> None:
        """Close the calling thread's connection."""
        self._clients.store = self._clients.all = None

    def say_here(self, *, black_box: str) -> None:
        """Publish this rank's process, and the name of the file of its last stack."""
        here = Process(pid=os.getpid(), host=this_host(), black_box=black_box, main_thread=threading.get_ident())
        self.board(1).put(f"here/{self.rank}", here.model_dump(mode="json"))

    def process_of(self, rank: int) -> Process:
        """The process that a rank of any domain published."""
        return self.board(1).peek(f"here/{rank}", Process) or Process()

    def keep_flow(self, flow: Flow) -> None:
        """Publish what this rank has executed, before it leaves: its ring ends with it."""
        self.board(1).put(f"flow/{self.rank}", flow.model_dump(mode="json"))

    def kept_flow(self, rank: int) -> Flow | None:
        """What a rank of any domain has published that has left."""
        found: Flow | None = self.board(1).peek(f"flow/{rank}", Flow)
        return found

    def append(self, kind: type[E], **fields: Any) -> None:
        """Append an entry to the log, which wakes every listener."""
        store = self._count(2)
        entry = kind(rank=self.rank, **fields)
        store.put(f"event/{store.count('events')}", entry.model_dump(mode="json"))

    def entries(self) -> Iterator[Entry]:
        """Every valid entry of a member, from the first one on; blocks for the next one.

        Raises RuntimeError without a store.
        """
        number = 1
        while True:
            if number % _BATCH == 1 and number > 1:
                self._sweep(number // _BATCH)
            store = self._count(2)
            key = f"event/{number}"
            is_there = store.wait(key, timeout_s=_FOREVER_S)
            entry: Entry | None = store.peek(key, AnyEntry) if is_there else None
            number += is_there
            if entry is not None and entry.rank in self.members:
                yield entry

    def _sweep(self, batch: int) -> None:
        """Record that this rank has heard that batch of entries; the last rank deletes it."""
        store = self._count(1)
        if store.count(f"heard/{batch}") == len(self.members):
            entries = range((batch - 1) * _BATCH + 1, batch * _BATCH + 1)
            self._delete([*_entry_keys(entries), f"heard/{batch}"])
            store.count("swept")

    def _delete(self, keys: Sequence[str]) -> None:
        self._count(len(keys)).delete(*keys)

    def leave(self, state: RankState, *, has_heard: Callable[[float], bool]) -> None:
        """Publish that this rank leaves. Ranks that leave within a moment share an entry of the log.

        `has_heard` waits that many seconds for the listener of this rank to read an entry that has it.
        """
        store = self._count(2)
        store.put(f"left/{self.rank}", state.model_dump(mode="json"))
        is_last = store.count("left") == len(self.members)
        for _ in range(0 if is_last else _MAX_ROUNDS):
            is_mine = self.claim(f"left/{self._count(1).count('events', 0)}")
            is_in_a_hurry = is_mine and state.ended != FINISHED
            if is_in_a_hurry:
                break
            if has_heard(_TOGETHER_S if is_mine else 2 * _TOGETHER_S):
                return
            if is_mine:
                break
        self._count(len(self.members))
        left = [rank for rank in self.members if store.has(f"left/{rank}")]
        self.append(Left, ranks=exact_ranks(left))

    def left(self, entry: Left) -> LeftRanks:
        """The ranks of an entry; what each did last is read when it is asked for."""
        return LeftRanks([rank for rank in self.members if is_among(rank, entry.ranks)], self._state_left)

    def _state_left(self, rank: int) -> RankState:
        found: RankState | None = self._count(1).peek(f"left/{rank}", RankState, sender=rank)
        return found or RankState(rank=rank, activity=RUNNING, since_s=0.0, ended=FINISHED)

    def all_finished(self) -> bool:
        """Record that this rank has finished; True for the last of all."""
        self._count(1)
        return self.board(1).count("finished") == self.world_size

    def forget(self) -> None:
        """Record that this rank reads no more; the last rank of a domain deletes its keys, the last of all the rest."""
        store, board, number = self._count(1), self.board(1), self.world_size
        if store.count("over") == len(self.members):
            swept, num_asks = store.count("swept", 0), store.count("asks", 0)
            asks = range(max(num_asks - _ANSWERS, 0) + 1, num_asks + 1)
            entries = range(swept * _BATCH, store.count("events", 0) + 1)
            batches = range(swept, len(entries) // _BATCH + swept + 2)
            keys = [f"{name}/{rank}" for name in ("left", "called") for rank in self.members]
            keys += [f"state/{ask}/{rank}" for ask in asks for rank in self.members]
            keys += agreed_keys(store, self.members)
            keys += [*_entry_keys(entries), *(f"heard/{batch}" for batch in batches)]
            self._delete([*keys, *_OF_DOMAIN])
        if board.count("over") == number:
            keys = [f"{name}{rank}" for name in ("here/", "flow/", "") for rank in range(number)]
            self._count(len(keys) + 5)
            board.delete(*keys, "published", "job", "over", "finished", "run_dir")

    def announce(self, found: Announcement) -> None:
        """Publish that a compile begins, unless a rank has done so for this position."""
        if self._count(1).count(f"first/{found.position.key}") == 1:
            self.append(CompileBegins, announcement=found)

    def post(self, position: Position, mine: CompilePost) -> tuple[bool, bool]:
        """Publish what was compiled at a position; returns (this rank is the last one, all posts are equal)."""
        store, key = self._count(3), position.key
        first = store.put_first(f"post/{key}", mine.model_dump(mode="json"), CompilePost)
        theirs = None if first is None else first.model_copy(update={"rank": mine.rank})
        if theirs != mine:
            store.put(f"differs/{key}", True)
        is_last = store.count(f"posted/{key}") == len(self.members)
        is_equal = not (is_last and store.peek(f"differs/{key}", bool))
        if is_last and is_equal:
            store.delete(f"post/{key}", f"posted/{key}")
        return is_last, is_equal

    def settle(self, position: Position) -> None:
        """Publish that all ranks have compiled the same at a position, which no rank writes about from then on."""
        self.decide(position, Settled)
        self._delete([f"first/{position.key}", f"decided/{position.key}"])

    def decide(self, position: Position, kind: type[E], **fields: Any) -> None:
        """Decide on a position and publish that to every rank, unless it is decided."""
        if self._count(1).count(f"decided/{position.key}") == 1:
            self.append(kind, position=position, **fields)

    def claim(self, name: str) -> bool:
        """True for the first rank that claims `name`."""
        return self._count(1).count(f"claim/{name}") == 1

    def is_claimed(self, name: str) -> bool:
        """True once a rank has claimed `name`."""
        return self._count(1).count(f"claim/{name}", by=0) > 0

    def say_more(self, number: int, news: Table) -> bool:
        """Publish the difference of that number; False, and nothing published, where the neighbour reads none."""
        store = self._count(2)
        if number > _UNREAD and store.has(f"more/{self.rank}/{number - _UNREAD}"):
            return False
        store.put(f"more/{self.rank}/{number}", news)
        return True

    def more_of(self, rank: int, number: int) -> Table | None:
        """The difference of that number that a rank has published, once; None where there is none."""
        key = f"more/{rank}/{number}"
        found: Table | None = self._count(1).peek(key, Table)
        if found is not None:
            self._delete([key])
        return found

    def say_called(self, called: Called, *, num_said: int) -> None:
        """Publish all that this rank called, before it leaves; differences that nobody has read are deleted."""
        self._count(1).put(f"called/{self.rank}", called.model_dump(mode="json"))
        unread = range(max(num_said - _UNREAD, 0) + 1, num_said + 1)
        self._delete([f"more/{self.rank}/{number}" for number in unread])

    def called_on(self, ranks: Sequence[int]) -> dict[int, Called]:
        """What these ranks called that have published it all."""
        keys = {rank: f"called/{rank}" for rank in ranks}
        return self._count(len(ranks)).gather(keys, Called, timeout_s=0.0, budget=Budget(_MAX_CALLED_BYTES))[0]

    def differ(self, sha: str, *, wait_s: float) -> bool:
        """Publish the hash of the variants that this rank ran, and wait for the others; True where one differs."""
        store = self._count(4)
        if store.put_first("ran/first", sha, str) != sha:
            store.put("ran/differs", True)
        if store.count("ran/posted") == len(self.members):
            store.put("ran/complete", True)
        else:
            store.wait("ran/complete", timeout_s=wait_s)
        return bool(store.peek("ran/differs", bool))

    def say_judged(self, *, has_parted: bool) -> None:
        """Publish whether variants that differ are a finding."""
        self._count(1).put("ran/judged", has_parted)

    def judged(self, *, wait_s: float) -> bool:
        """True where a rank has published in time that variants which differ are a finding."""
        return bool(self._count(2).get("ran/judged", bool, timeout_s=wait_s))

    def raises_first(self) -> bool:
        """Publish that an exception ends this rank; True for the first rank that does."""
        return bool(self._count(1).put_first("raised", self.rank, Rank) == self.rank)

    def first_raised(self) -> int | None:
        """The first rank that raised an exception, None while there is none."""
        found: int | None = self._count(1).peek("raised", Rank)
        return found

    def say_closed(self) -> None:
        """Publish that this rank sends nothing more, so that its peers may end."""
        self._count(1).put(f"closed/{self.rank}", True)

    def has_closed(self, rank: int) -> bool:
        """True when a rank that raised sends nothing more."""
        return bool(self._count(1).peek(f"closed/{rank}", bool))

    def say_terminated(self, at_s: float) -> None:
        """Publish when this rank received SIGTERM."""
        self._count(1).put(f"terminated/{self.rank}", at_s)

    def terminated_at(self, rank: int) -> float | None:
        """When a rank received SIGTERM; None if it did not, or could not publish it."""
        found: float | None = self._count(1).peek(f"terminated/{rank}", Seconds)
        return found

    def say_failed(self, state: RankState) -> None:
        """Publish the state of this rank where communication failed."""
        self._count(1).put(f"failed/{self.rank}", state.model_dump(mode="json"))

    def failed(self, ranks: Sequence[int]) -> dict[int, RankState]:
        """The states of those ranks that have said that communication failed there."""
        return published(self._count(len(ranks)).under("failed"), ranks, RankState)

    def say_problem(self, problem: Check) -> None:
        """Publish to all domains why the job ends, unless a domain has done so."""
        self.board(1).put_first("problem", problem.model_dump(mode="json"), Check)

    def first_problem(self) -> Check | None:
        """Why a domain ends the job; None while none does."""
        found: Check | None = self.board(1).peek("problem", Check)
        return found

    def board(self, operations: int) -> RankStore:
        """A client under the prefix that all domains share."""
        self._count(operations)
        board: RankStore = self._clients.all.under(self._board)
        return board

    def run_dir(self, configured: Path | str | None) -> Path:
        """Directory of the reports of all domains; the first rank that calls this chooses which."""
        return agreed_run_dir(self.board(1), "sentinel", configured)

    def job(self) -> str:
        """Identity of the run, equal in all domains."""
        return agreed_job(self.board(1))

    def host_of(self, rank: int) -> str:
        """Name of the host of a rank of any domain; empty where it has not said it."""
        return host_name(self.process_of(rank).host)

    def answer(self, ask: int, state: RankState) -> None:
        """Answer an `ask` event, and delete the answer that nobody reads any more."""
        store = self._count(2)
        store.put(f"state/{ask}/{self.rank}", state.model_dump(mode="json"))
        store.delete(f"state/{ask - _ANSWERS}/{self.rank}")

    def ask(self, ranks: Sequence[int], *, timeout_s: float) -> dict[int, RankState]:
        """Ask all ranks for their state; returns the answers of `ranks` that came in time."""
        number = self._count(1).count("asks")
        self.append(Ask, number=number)
        return self.answers(number, ranks, timeout_s=timeout_s)

    def answers(self, ask: int, ranks: Sequence[int], *, timeout_s: float) -> dict[int, RankState]:
        """The answers that came in time, by rank."""
        return published(self._count(1).under(f"state/{ask}"), ranks, RankState, timeout_s=timeout_s)

    def other_domains(self, states: Mapping[int, RankState]) -> dict[int, Seen]:
        """Publish these states to other domains if one waits for them; returns those that it waits for.

        These may wait for ranks of a further domain, and so on: all of them are returned.
        """
        wanted = waited_for(states.values()) - set(self.members)
        if not wanted:
            return {}
        number = self._count(len(states) + 2).count("published")
        board = self.board(0)
        for rank, state in states.items():
            seen = Seen(state=state, number=number, domain=self.members)
            board.put(str(rank), seen.model_dump(mode="json"))
        return reachable(board, wanted, set(self.members))

    def store(self, prefix: str, *, operations: int = 0) -> RankStore:
        """A client under its own prefix, for one exchange, or for that many operations."""
        return self._count(operations).under(prefix)


def _entry_keys(entries: Iterable[int]) -> list[str]:
    return [f"{name}/{entry}" for entry in entries for name in ("event", "claim/left")]
