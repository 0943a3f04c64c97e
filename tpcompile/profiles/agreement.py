"""What each rank is about to run -> the same on all of them, or an error that names the ranks that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

from tpcompile.errors import ConfigError, DivergenceError
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.bounds import Number, Rank
from tpcompile.evidence.text.ranks import exact_ranks, named_ranks
from tpcompile.ranks.agree import agree
from tpcompile.ranks.processes import Processes
from tpcompile.ranks.store import RankStore

T = TypeVar("T")
_NUMBERS: Counter[str] = Counter()
_PLURALS = {"profile": "profiles", "all_reduce": "settings of all_reduce", "signature": "signatures"}


class Vote(Frozen):
    """What a rank is about to run."""

    program: str
    profile: str
    all_reduce: str = "nccl"
    """How its graphs sum over ranks, with the table."""
    signature: str = ""
    """Signature of the call that it captures; empty where it captures nothing."""


class _Brought(Frozen, Generic[T]):
    """What a rank comes to a step with."""

    vote: Vote
    value: T


class _Settled(Frozen, Generic[T]):
    """What one rank has decided for all."""

    problem: str = ""
    ranks: tuple[Rank, ...] = ()
    """Ranks to blame for the problem."""
    decided: T | None = None


class _Made(Frozen, Generic[T]):
    asked: str
    made: T


class _Last(Frozen):
    step: Number
    vote: Vote


class Agreement:
    """The ranks of a group, which take the same steps with one callable; every rank makes one.

    Steps are numbered. A rank that does not come to one within `timeout_s`, or whose process has ended, is named, to
    itself too when it comes later.
    """

    def __init__(self, ranks: Sequence[int], *, timeout_s: float) -> None:
        self._ranks, self._timeout_s = sorted(ranks), timeout_s
        members = exact_ranks(self._ranks)
        _NUMBERS[members] += 1
        self._store = RankStore.of_job(f"tpcompile/profiles/{members}/{_NUMBERS[members]}", None)
        self._processes = Processes(self._store)
        self._num_steps = 0

    def agree(self, vote: Vote) -> None:
        """Return when all ranks have come with the same vote; DivergenceError on all of them otherwise."""
        self.share(vote, None, None, decide=lambda _: None, result=None)

    def share(
        self, vote: Vote, value: Any, kind: Any, *, decide: Callable[[Mapping[int, Any]], Any], result: Any
    ) -> Any:
        """Exchange a value of `kind` with the vote; the `result` that one rank has decided from all values, on all.

        Raises DivergenceError on all of them when votes differ, a rank does not come, or `decide` raises ConfigError.
        """
        self._num_steps += 1
        last = _Last(step=self._num_steps, vote=vote)
        self._store.put(f"last/{self._store.rank}", last.model_dump(mode="json"))

        def settle(brought: Mapping[int, _Brought[Any]], absent: Mapping[int, str]) -> _Settled[Any]:
            problem, ranks = difference(ByRank(brought).map(lambda one: one.vote))
            if absent and not problem:
                problem, ranks = self._absence(vote, list(absent)), tuple(absent)
            if problem:
                return _Settled(problem=problem, ranks=ranks)
            try:
                return _Settled(decided=decide(ByRank(brought).map(lambda one: one.value)))
            except ConfigError as error:
                return _Settled(problem=str(error))

        settled = agree(
            self._store.under(f"step/{self._num_steps}"),
            self._ranks,
            _Brought[kind](vote=vote, value=value),
            kind=_Brought[kind],
            decide=settle,
            result=_Settled[result],
            timeout_s=self._timeout_s,
            gone=self._processes.is_gone,
        )
        if settled.problem:
            raise DivergenceError(settled.problem, ranks=settled.ranks)
        return settled.decided

    def of_first_rank(self, key: str, asked: str, make: Callable[[], T], kind: type[T]) -> T:
        """What `make` returns on the first rank, of `kind`, on all ranks that ask for the same.

        Raises DivergenceError on a rank that asks for something else, or whose first rank does not answer in time.
        """
        rank, first = self._store.rank, self._ranks[0]
        if rank == first:
            made = make()
            mine = _Made[kind](asked=asked, made=made)  # type: ignore[valid-type]
            self._store.put(key, mine.model_dump(mode="json"))
            return made
        gone = self._processes.is_gone
        found, _ = self._store.gather({first: key}, _Made[kind], timeout_s=self._timeout_s, gone=gone)  # type: ignore[valid-type]
        if not found:
            raise DivergenceError(
                f"rank {rank} waits for {key} of rank {first}, {asked}, which did not come within "
                f"{self._timeout_s:g} s: rank {first} {self._last_of(first)}", ranks=[first],
            )  # fmt: skip
        theirs: _Made[T] = found[first]
        if theirs.asked != asked:
            raise DivergenceError(f"{key} is {theirs.asked} on rank {first} / {asked} on rank {rank}", ranks=[rank])
        return theirs.made

    def _absence(self, vote: Vote, missing: Sequence[int]) -> str:
        doing = f"runs {vote.program} under profile {vote.profile}"
        if vote.signature:
            doing = f"captures {vote.program} under profile {vote.profile} for {vote.signature}"
        seen = "; ".join(f"rank {rank} {self._last_of(rank)}" for rank in missing)
        limit = f"within {self._timeout_s:g} s"
        who = named_ranks(missing)
        return f"rank {self._store.rank} {doing}, and {who} did not come {limit}: {seen}"

    def _last_of(self, rank: int) -> str:
        if self._processes.is_gone(rank):
            return "has ended"
        last = self._store.peek(f"last/{rank}", _Last)
        if last is None:
            return "has not called it"
        what = f"profile {last.vote.profile} {last.vote.signature}"
        return f"was last seen at step {last.step}, {what}".rstrip()


def difference(votes: ByRank[Vote]) -> tuple[str, tuple[int, ...]]:
    """What the ranks are about to run differently, with both values, and the ranks unlike most; empty for nothing."""
    program = votes.first.program
    for name in Vote.model_fields:
        about = "different programs" if name == "program" else f"{program} has different {_PLURALS[name]}"
        values = votes.map(attrgetter(name))
        odd = values.unlike_most(str)
        if odd:
            shown = [
                f"{value or 'none'} on {named_ranks(ranks)}"
                for value, ranks in grouped(values, values.__getitem__).items()
            ]
            return f"{about}: {' / '.join(shown)}; all ranks must make the same calls under the same profile", odd
    return "", ()
