"""What each rank is about to run -> the same on all of them, or an error that names the ranks that differ.

Through the store, never by a collective: ranks that run different profiles or capture at different calls would wait for
each other in the collectives of what they run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch.distributed as dist

from tpcompile.errors import DivergenceError
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import Frozen
from tpcompile.evidence.text.ranks import named_ranks, ranks_text
from tpcompile.ranks.liveness import process_state, this_host
from tpcompile.ranks.store import RankStore

_NUMBERS: Counter[str] = Counter()
_PLURALS = {"profile": "profiles", "all_reduce": "settings of all_reduce", "signature": "signatures"}


class Vote(Frozen):
    """What a rank is about to run."""

    program: str
    profile: str
    all_reduce: str = "nccl"
    """How its graphs sum over ranks, with the table."""
    signature: str = ""
    """Of the call that it captures; empty where it captures nothing."""


class Agreement:
    """The ranks of a group, which take the same steps with one callable; every rank makes one.

    Steps are numbered. A rank that does not come to one within `timeout_s`, or whose process has ended, is named, to
    itself too when it comes later.
    """

    def __init__(self, ranks: Sequence[int], *, timeout_s: float, store: dist.Store | None = None) -> None:
        self._ranks, self._timeout_s = sorted(ranks), timeout_s
        members = ranks_text(self._ranks)
        _NUMBERS[members] += 1
        self._store = RankStore.of_job(f"tpcompile/profiles/{members}/{_NUMBERS[members]}", store)
        self._store.put(f"process/{self._store.rank}", {"pid": os.getpid(), "host": this_host()})
        self._num_steps = 0

    def agree(self, vote: Vote) -> None:
        """Return when all ranks have come with the same vote; DivergenceError on all of them otherwise."""
        self.share(vote, None, decide=lambda _: {})

    def share(self, vote: Vote, value: Any, *, decide: Callable[[Mapping[int, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Exchange a JSON value with the vote; what one rank has decided from the values of all is the same on all.

        Raises DivergenceError on all of them when votes differ, a rank does not come, or the decision is a `problem`.
        """
        self._num_steps += 1
        store = self._store.under(f"step/{self._num_steps}")
        mine = vote.model_dump(mode="json")
        store.put(f"vote/{store.rank}", {"vote": mine, "value": value})
        self._store.put(f"last/{store.rank}", {"step": self._num_steps, **mine})
        keys = {rank: f"vote/{rank}" for rank in self._ranks}
        found, missing = store.gather(keys, timeout_s=self._timeout_s, stop_at="settled", gone=self._is_gone)
        votes = ByRank({rank: Vote.model_validate(one["vote"]) for rank, one in sorted(found.items())})
        problem, ranks = difference(votes)
        if missing and not problem:
            problem, ranks = self._absence(vote, missing), missing
        if problem:
            decided = {"problem": problem, "ranks": list(ranks)}
        else:
            decided = decide({rank: found[rank]["value"] for rank in votes})
        settled: dict[str, Any] = store.put_first("settled", decided)
        if "problem" in settled:
            raise DivergenceError(settled["problem"], ranks=settled.get("ranks", ()))
        return settled

    def of_first_rank(self, key: str, asked: str, make: Callable[[], Any]) -> Any:
        """What `make` returns on the first rank, JSON, on all ranks that ask for the same.

        Raises DivergenceError on a rank that asks for something else, or whose first rank does not answer in time.
        """
        rank, first = self._store.rank, self._ranks[0]
        if rank == first:
            made = make()
            self._store.put(key, {"asked": asked, "made": made})
            return made
        found, _ = self._store.gather({first: key}, timeout_s=self._timeout_s, gone=self._is_gone)
        if not found:
            raise DivergenceError(
                f"rank {rank} waits for {key} of rank {first}, {asked}, which did not come within "
                f"{self._timeout_s:g} s: rank {first} {self._last_of(first)}", ranks=[first],
            )  # fmt: skip
        if found[first]["asked"] != asked:
            theirs = found[first]["asked"]
            raise DivergenceError(f"{key} is {theirs} on rank {first} / {asked} on rank {rank}", ranks=[rank])
        return found[first]["made"]

    def _is_gone(self, rank: int) -> bool:
        process = self._store.peek(f"process/{rank}")
        return process is not None and process_state(process["pid"], process["host"]) == "dead"

    def _absence(self, vote: Vote, missing: Sequence[int]) -> str:
        doing = f"runs {vote.program} under profile {vote.profile}"
        if vote.signature:
            doing = f"captures {vote.program} under profile {vote.profile} for {vote.signature}"
        seen = "; ".join(f"rank {rank} {self._last_of(rank)}" for rank in missing)
        limit = f"within {self._timeout_s:g} s"
        return f"rank {self._store.rank} {doing}, and {named_ranks(missing)} did not come {limit}: {seen}"

    def _last_of(self, rank: int) -> str:
        if self._is_gone(rank):
            return "has ended"
        last = self._store.peek(f"last/{rank}")
        if last is None:
            return "has not called it"
        what = f"profile {last['profile']}"
        return f"was last seen at step {last['step']}, {what} {last['signature']}".rstrip()


def difference(votes: ByRank[Vote]) -> tuple[str, tuple[int, ...]]:
    """What the ranks are about to run differently, with both values, and the ranks unlike most; empty for nothing."""
    program = votes.first.program
    for name in Vote.model_fields:
        about = "different programs" if name == "program" else f"{program} has different {_PLURALS[name]}"
        values = votes.map(attrgetter(name))
        odd = values.unlike_most(str)
        if odd:
            shown = [f"{value or 'none'} on {named_ranks(ranks)}" for value, ranks in _by_value(values).items()]
            return f"{about}: {' / '.join(shown)}; all ranks must make the same calls under the same profile", odd
    return "", ()


def _by_value(values: ByRank[str]) -> dict[str, list[int]]:
    return grouped(values, lambda rank: values[rank])
