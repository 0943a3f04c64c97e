"""A digest from every rank -> one verdict on all of them, through the store; one rank judges.

    common/<sha>             what ranks with that hash have in common, written by the first of them
    digest/<rank>            the hash, and what is each rank's own
    first/<sha>              counter: the first rank with a hash writes what belongs to it
    judge/<n>                the rank that judges after n others, which are gone
    ask/<n>/<rank>/<number>  a question of that judge for details; answer/... likewise
    verdict, read            what all ranks return, and how many have read it: the last one deletes it

Rank 0 judges; a different rank does when it is gone or has not come in time. The judge reads one entry of each rank,
and the rest once for each hash: equal ranks cost a hash each. Details are sent only when it asks for them, and it asks
only where hashes differ.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from loguru import logger
from pydantic import BaseModel, Field, JsonValue

from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import Frozen, Verdict
from tpcompile.evidence.records.bounds import Rank, checked, typed
from tpcompile.ranks.packed import PackedVerdict, packed
from tpcompile.ranks.store import Budget, RankStore

_DETAIL_TIMEOUT_S = 60.0
"""How long a rank that has published its digest may take for the details behind it."""
_MAX_READ_BYTES = 256 << 20
"""What a judge reads of its peers at most: one that writes more is not compared."""
_ASKED = 2
"""Ranks asked at most for what ranks with one hash have in common: each that does not answer costs the timeout."""
_POLL_S, _POLL_S_PER_RANK = 0.02, 0.001
"""Pause between the looks of a rank that waits for the verdict, at least, and for each rank: the store serves them all.

A rank that was asked looks more often again, since the judge asks it one question after the other.
"""
_GROWS = 1.5
_LOOKS_S = 1.0
"""Pause between the looks at the judge's process."""
_LOWER, _LEFT_LOOKS = 8, 3
"""Lower ranks that a rank looks at before it becomes the judge, and looks for which it leaves that to them."""
_WHOLE = "digest"
"""The question for what is in common."""
_Whole = Literal["digest"]

Question = Any
"""JSON of the side's kind of question."""


class Others(Protocol):
    """What this rank knows of the other ranks."""

    def last_seen(self, rank: int) -> str:
        """The last state that rank published, as text."""

    def is_gone(self, rank: int) -> bool:
        """True when that rank is known to be dead."""


class Fetch(Protocol):
    """Ask one rank for details."""

    def __call__(self, rank: int, question: Question, kind: Any) -> Any | None:
        """Return the answer of the rank; None when it did not arrive in time, or is not of `kind`."""


class Ask:
    """Asks ranks for details: one, as a `Fetch`, or several at once."""

    def __init__(self, many: Callable[[Sequence[int], Question, Any], dict[int, Any]]) -> None:
        self.many = many
        """(ranks, question, kind) -> the answers of that kind that arrived in time, by rank."""

    def __call__(self, rank: int, question: Question, kind: Any) -> Any | None:
        """The answer of one rank, or None."""
        return self.many([rank], question, kind).get(rank)


@dataclass(frozen=True)
class Side:
    """What a rank contributes to an exchange."""

    digest: Mapping[str, Any]
    """JSON that every rank publishes: hashes, small."""
    answer: Callable[[Any], Any]
    """Question of the judge, of kind `question` -> details, JSON; None where there are none."""
    judge: Callable[[dict[int, Any], dict[int, str], Ask], Verdict]
    """(digests by rank, of kind `kind`; last-seen text of every absent rank; ask) -> verdict."""
    kind: Any
    """Type of a digest."""
    question: Any
    """Type of a question."""
    own_fields: Set[str] = frozenset({"rank"})
    """Fields of a digest that differ between healthy ranks: all others are in common."""

    @property
    def own(self) -> Any:
        """The digest of this rank, as that of a different rank is read."""
        return typed(self.digest, self.kind)

    def own_answer(self, question: Question, kind: Any) -> Any | None:
        """The answer of this rank to itself, as that of a different rank is read."""
        answer = self.answer(typed(question, self.question))
        return None if answer is None else typed(answer, kind)

    def judged_alone(self, absent: dict[int, str]) -> Verdict:
        """The verdict where no other rank can be reached."""
        own = self.own
        ask = Ask(lambda _, *asked: {own.rank: self.own_answer(*asked)})
        return self.judge({own.rank: own}, absent, ask)


class _Entry(Frozen):
    """What a rank publishes: its own fields, and the hash of the others."""

    rank: Rank
    sha: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    own: dict[str, JsonValue] = {}


def _sha(common: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()


class _Published:
    """This rank's digest in the store: its entry, and what it has in common with others where it is the first."""

    def __init__(self, store: RankStore, side: Side) -> None:
        own = {name: value for name, value in side.digest.items() if name in side.own_fields}
        self.common = {name: value for name, value in side.digest.items() if name not in side.own_fields}
        sha = _sha(self.common)
        self.entry = _Entry(rank=store.rank, sha=sha, own=own)
        self._store = store
        self._keys = [f"digest/{store.rank}"]
        if store.count(f"first/{sha}") == 1:
            self._keys += [f"common/{sha}", f"first/{sha}"]
            store.put(f"common/{sha}", self.common)
        store.put(f"digest/{store.rank}", self.entry.model_dump(mode="json"))

    def delete(self) -> None:
        """Remove it: the judge has read it."""
        self._store.delete(*self._keys)


class Exchange:
    """One exchange among `ranks`: this rank judges, or answers the one that does.

    `keeps`: the verdict stays in the store, for ranks that come twice.
    """

    def __init__(
        self, store: RankStore, ranks: Iterable[int], *, others: Others, timeout_s: float, keeps: bool = False
    ) -> None:
        self._store, self._others, self._timeout_s, self._keeps = store, others, timeout_s, keeps
        self._ranks = sorted(ranks)
        self.has_judged = False

    def verdict(self, side: Side) -> Verdict | None:
        """Publish this rank's digest and return the verdict; None when the judge stopped responding.

        A rank that does not publish within `timeout_s` is passed to the judge as absent.
        """
        deadline = time.monotonic() + self._timeout_s
        mine = _Published(self._store, side)
        turn = _Turn(self._store, self._ranks, self._others, deadline)
        is_judge = self._store.rank == self._ranks[0] and turn.claims()
        verdict = None if is_judge else self._answer(side, mine, turn, deadline)
        if turn.is_mine:
            self.has_judged = True
            verdict = _Judge(self._store, side, mine, turn, self._others).verdict(self._ranks, deadline)
        if verdict is not None:
            mine.delete()
            is_last = not self._keeps and self._store.count("read") == len(self._ranks)
            self._store.delete(*(("verdict", "read", *turn.keys) if is_last else ()))
        return verdict

    def _answer(self, side: Side, mine: _Published, turn: _Turn, deadline: float) -> Verdict | None:
        """Answer the judge's questions until there is a verdict, or this rank is the judge."""
        longest_s = max(_POLL_S, _POLL_S_PER_RANK * len(self._ranks))
        pause_s, looks_at, ends_at = longest_s / 4, 0.0, deadline + _DETAIL_TIMEOUT_S
        while not turn.is_mine:
            now_s = time.monotonic()
            verdict: Verdict | None = self._store.peek("verdict", PackedVerdict)
            if verdict is not None or self._store.why_refused("verdict"):
                return verdict
            if self._reply(turn, side, mine):
                pause_s, ends_at = _POLL_S, now_s + self._timeout_s + _DETAIL_TIMEOUT_S
                continue
            if now_s > ends_at:
                return None
            if now_s >= looks_at:
                looks_at = now_s + min(_LOOKS_S, self._timeout_s)
                if turn.moves_on():
                    ends_at = now_s + self._timeout_s + _DETAIL_TIMEOUT_S
            time.sleep(pause_s)
            pause_s = min(_GROWS * pause_s, longest_s)
        return None

    def _reply(self, turn: _Turn, side: Side, mine: _Published) -> bool:
        """Answer the next question to this rank; False where there is none."""
        key = turn.next_question(self._store.rank)
        question = self._store.peek(f"ask/{key}", side.question | _Whole)
        is_understood = question is not None
        if not is_understood and not self._store.why_refused(f"ask/{key}"):
            return False
        answer = None
        if is_understood:
            answer = mine.common if question == _WHOLE else side.answer(question)
        turn.asked[self._store.rank] += 1
        self._store.put(f"answer/{key}", answer)
        self._store.delete(f"ask/{key}")
        return True


class _Turn:
    """Whose turn it is to judge, as one rank knows it."""

    def __init__(self, store: RankStore, ranks: Sequence[int], others: Others, deadline: float) -> None:
        self._store, self._ranks, self._others, self._deadline = store, ranks, others, deadline
        self._num_gone = 0
        """Judges that are gone."""
        self._num_looks = 0
        """Times that this rank has left it to a lower one to become the judge."""
        self.is_mine = False
        self.asked: Counter[int] = Counter()
        """Questions of this judge to each rank so far."""

    @property
    def keys(self) -> list[str]:
        """The keys of all judges so far."""
        return [f"judge/{number}" for number in range(self._num_gone + 1)]

    def next_question(self, rank: int) -> str:
        """Where the next question to a rank is, and the answer."""
        return f"{self._num_gone}/{rank}/{self.asked[rank] + 1}"

    def claims(self) -> bool:
        """Become the judge unless a different rank has: two would wait for each other's answers."""
        self.is_mine = self._store.put_first(self.keys[-1], self._store.rank, Rank) in (self._store.rank, None)
        return self.is_mine

    def moves_on(self) -> bool:
        """Go on to the next judge where this one is gone, and become it where no lower rank does."""
        is_known = self._store.has(f"judge/{self._num_gone + 1}")  # a rank of its host has seen that it is gone
        if not is_known and not self._is_gone():
            return False
        if is_known or self._store.has(self.keys[-1]):
            self._num_gone += 1
            self.asked.clear()
        if not self._store.has(self.keys[-1]) and not self._leaves_it():
            self.claims()
        return True

    def _is_gone(self) -> bool:
        first = self._ranks[0]
        judge = self._store.peek(self.keys[-1], Rank)
        is_late = time.monotonic() > self._deadline and not self._store.has(f"digest/{first}")
        if judge is None and self._num_gone == 0:
            return is_late or self._others.is_gone(first)
        return judge is None or self._others.is_gone(judge)

    def _leaves_it(self) -> bool:
        """True while a lower rank may become the judge, for which this one waits a few looks."""
        self._num_looks += 1
        lower = [rank for rank in self._ranks[:_LOWER] if rank < self._store.rank]
        alive = (rank for rank in lower if self._store.has(f"digest/{rank}") and not self._others.is_gone(rank))
        return self._num_looks <= _LEFT_LOOKS and any(True for _ in alive)


class _Judge:
    """The rank that judges: it reads the digest of each rank, and asks for details."""

    def __init__(self, store: RankStore, side: Side, mine: _Published, turn: _Turn, others: Others) -> None:
        self._store, self._side, self._mine, self._turn, self._others = store, side, mine, turn, others
        self._budget = Budget(_MAX_READ_BYTES)
        self._silent: set[int] = set()
        """Ranks that did not answer a question in time; they are not asked again."""
        self._refused: dict[int, str] = {}
        """Ranks whose digest is not valid, and why."""
        self.ask = Ask(self._ask)

    def verdict(self, ranks: Sequence[int], deadline: float) -> Verdict:
        """Judge what these ranks publish until then, and publish the verdict."""
        keys = {rank: f"digest/{rank}" for rank in ranks if rank != self._store.rank}
        wait_s = max(deadline - time.monotonic(), 0.0)
        entries, late = self._gather(keys, _Entry, wait_s)
        self._refused = {rank: why for rank in late if (why := self._store.why_refused(keys[rank]))}
        found = self._digests([self._mine.entry, *entries.values()])
        absent = {}
        for rank in sorted({*late, *self._refused}):
            seen, problem = self._others.last_seen(rank), self._refused.get(rank)
            absent[rank] = f"{seen}; what it sent is not valid: {problem}" if problem else seen
        verdict = self._side.judge(dict(sorted(found.items())), absent, self.ask)
        # the first one counts, should a rank have taken this one for dead
        first: Verdict | None = self._store.put_first("verdict", packed(verdict), PackedVerdict)
        return verdict if first is None else first

    def _gather(self, keys: dict[int, str], kind: Any, timeout_s: float) -> tuple[dict[int, Any], tuple[int, ...]]:
        return self._store.gather(keys, kind, timeout_s=timeout_s, gone=self._others.is_gone, budget=self._budget)

    def _digests(self, entries: Iterable[_Entry]) -> dict[int, Any]:
        """The digest of each rank; those with equal hashes share what they have in common."""
        found: dict[int, Any] = {}
        for sha, alike in grouped(entries, lambda entry: entry.sha).items():
            common = self._common(sha, [entry.rank for entry in alike])
            for entry in alike:
                own = {name: entry.own[name] for name in self._side.own_fields & entry.own.keys()}
                try:
                    if common is None:
                        raise ValueError("no rank sent what belongs to its hash")
                    digest = checked(
                        {**common, **own}, self._side.kind, world_size=self._store.world_size, sender=entry.rank
                    )
                except ValueError as error:
                    self._refused[entry.rank] = str(error)
                    continue
                found[entry.rank] = digest
                if isinstance(digest, BaseModel):
                    common = {name: getattr(digest, name) for name in common}
        return found

    def _common(self, sha: str, ranks: Sequence[int]) -> Mapping[str, Any] | None:
        """What ranks with this hash have in common; one of them is asked where the first has died too early."""
        if sha == self._mine.entry.sha:
            return self._mine.common
        found = self._store.peek(f"common/{sha}", dict[str, JsonValue], budget=self._budget)
        for rank in ranks[:_ASKED]:
            if found is None or _sha(found) != sha:
                found = self.ask(rank, _WHOLE, dict[str, JsonValue])
        return found if found is not None and _sha(found) == sha else None

    def _ask(self, ranks: Sequence[int], question: Question, kind: Any) -> dict[int, Any]:
        """The answers of these ranks to one question, all asked at once."""
        answers: dict[int, Any] = {}
        keys: dict[int, str] = {}
        for rank in ranks:
            if rank == self._store.rank:
                answers[rank] = self._side.own_answer(question, kind)
            elif rank not in self._silent:
                key = self._turn.next_question(rank)
                self._turn.asked[rank] += 1
                self._store.put(f"ask/{key}", question)
                keys[rank] = f"answer/{key}"
        theirs, late = self._gather(keys, kind, _DETAIL_TIMEOUT_S)
        for rank in late:
            if not self._store.has(keys[rank]):
                self._silent.add(rank)
                logger.warning("rank {} did not send the requested details", rank)
        self._store.delete(*keys.values())
        return {rank: answer for rank, answer in (answers | theirs).items() if answer is not None}
