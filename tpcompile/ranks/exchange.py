"""A digest from every rank -> one verdict on all of them, through the store; one rank judges.

The lowest rank that reported is the judge. Details are sent only when it asks for them, and it asks only where hashes
differ.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from loguru import logger

from tpcompile.evidence.records import Verdict
from tpcompile.evidence.records.bounds import Rank, typed
from tpcompile.ranks.store import RankStore

_DETAIL_TIMEOUT_S = 60.0
"""How long a rank that has published its digest may take for the details behind it."""

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


@dataclass(frozen=True)
class Side:
    """What a rank contributes to an exchange."""

    digest: Any
    """JSON that every rank publishes: hashes, small."""
    answer: Callable[[Any], Any]
    """Question of the judge, of kind `question` -> details, JSON; None where there are none."""
    judge: Callable[[dict[int, Any], dict[int, str], Fetch], Verdict]
    """(digests by rank, of kind `kind`; last-seen text of every absent rank; fetch) -> verdict."""
    kind: Any
    """Type of a digest."""
    question: Any
    """Type of a question."""

    @property
    def own(self) -> Any:
        """The digest of this rank, as that of a different rank is read."""
        return typed(self.digest, self.kind)

    def own_answer(self, question: Question, kind: Any) -> Any | None:
        """The answer of this rank to itself, as that of a different rank is read."""
        answer = self.answer(typed(question, self.question))
        return None if answer is None else typed(answer, kind)


class Exchange:
    """One exchange among `ranks`: this rank judges, or answers the one that does."""

    def __init__(self, store: RankStore, ranks: Iterable[int], *, others: Others, timeout_s: float) -> None:
        self._store, self._others, self._timeout_s = store, others, timeout_s
        self._keys = {rank: f"digest/{rank}" for rank in sorted(ranks)}
        self._theirs = self._keys.copy()
        del self._theirs[store.rank]
        self._asked: Counter[int] = Counter()
        self._silent: set[int] = set()
        """Ranks that did not answer a question in time; they are not asked again."""
        self.has_judged = False

    def verdict(self, side: Side) -> Verdict | None:
        """Publish this rank's digest and return the verdict; None when the judge stopped responding.

        A rank that does not publish within `timeout_s` is passed to the judge as absent.
        """
        deadline = time.monotonic() + self._timeout_s
        self._store.put(self._keys[self._store.rank], side.digest)
        if self._is_judge(side):
            return self._judge(side, wait_s=max(deadline - time.monotonic(), 0.0))
        return self._answer(side)

    def _is_judge(self, side: Side) -> bool:
        """The first rank judges. When it published no digest in time, the lowest rank that did takes over."""
        rank = self._store.rank
        first = min(self._keys)
        if rank == first:
            self._gather(self._theirs, side, timeout_s=self._timeout_s)
        else:
            lower = {other: key for other, key in self._theirs.items() if other < rank}
            found, _ = self._gather(lower, side, timeout_s=self._timeout_s, stop_at=self._keys[first])
            if found:
                return False
        # Two ranks may each see itself as the lowest, and two judges would wait for each other's answers.
        return self._store.put_first("judge", rank, Rank) in (rank, None)

    def _judge(self, side: Side, *, wait_s: float) -> Verdict:
        found, late = self._gather(self._theirs, side, timeout_s=wait_s)
        found[self._store.rank] = side.own
        absent = {}
        for rank in late:
            problem, seen = self._store.why_refused(self._keys[rank]), self._others.last_seen(rank)
            absent[rank] = f"{seen}; what it sent is not valid: {problem}" if problem else seen

        def fetch(rank: int, question: Question, kind: Any) -> Any | None:
            is_own = rank == self._store.rank
            return side.own_answer(question, kind) if is_own else self._ask(rank, question, kind)

        self.has_judged = True
        verdict = side.judge(dict(sorted(found.items())), absent, fetch)
        self._store.put("verdict", verdict.model_dump(mode="json"))
        return verdict

    def _gather(self, keys: dict[int, str], side: Side, **limits: Any) -> tuple[dict[int, Any], tuple[int, ...]]:
        return self._store.gather(keys, side.kind, gone=self._others.is_gone, **limits)

    def _ask(self, rank: int, question: Question, kind: Any) -> Any | None:
        if rank in self._silent:
            return None
        self._asked[rank] += 1
        number = f"{rank}/{self._asked[rank]}"
        self._store.put(f"ask/{number}", question)
        answer = self._store.get(f"answer/{number}", kind, timeout_s=_DETAIL_TIMEOUT_S)
        if answer is None:
            self._silent.add(rank)
            logger.warning("rank {} did not send the requested details", rank)
        return answer

    def _answer(self, side: Side) -> Verdict | None:
        """Answer the judge's questions until there is a verdict."""
        wait_s = self._timeout_s + _DETAIL_TIMEOUT_S
        for number in itertools.count(1):
            key = f"{self._store.rank}/{number}"
            found, _ = self._store.gather({0: "verdict"}, Verdict, timeout_s=wait_s, stop_at=f"ask/{key}")
            if found:
                verdict: Verdict = found[0]
                return verdict
            question = self._store.peek(f"ask/{key}", side.question)
            is_understood = question is not None
            if not is_understood and not self._store.why_refused(f"ask/{key}"):
                break
            self._store.put(f"answer/{key}", side.answer(question) if is_understood else None)
        return None
