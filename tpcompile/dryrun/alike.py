"""The ranks of a plan -> what they left, where as few are traced as can stand for all.

The first group is traced, and its first rank is watched, unless all of the job are traced in any case. Where no line
outside of torch is seen to learn the rank, the program is the same one on all ranks, and those of the last group are
traced, too, and two in the middle. Where such lines are outside of the calls, every rank is built, and called unless a
rank that was traced started its calls from the same state (reach.py).
That rests on three things, of which the last is an assumption and is checked on ranks that are traced all the same:

- calls read the rank nowhere: those of each rank that stands for others were watched, and drew no random numbers;
- what they can reach is equal, so they run the same lines;
- no installed package has kept the rank where no function that was reached names it.
"""

from __future__ import annotations

import gc
import importlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from tpcompile.dryrun.forks import Ended, Forks
from tpcompile.dryrun.plan import Asked
from tpcompile.dryrun.rank import Left
from tpcompile.dryrun.warm import generate_once, warm_up

_MAX_STARTS = 32
"""Different starts, beyond those of the first ranks, after which starts are no longer looked at unless they help."""
_MAX_CONFIRMED = 64
"""Ranks that are traced since a rank of their domain compiled something else."""


def trace_ranks(forks: Forks) -> Iterator[Ended]:
    """Trace the ranks of the plan; a rank that stands for others is yielded before them."""
    plan = forks.plan
    torch.set_num_threads(1)
    gc.freeze()  # what the imports made stays; no collection needs to look at it
    if plan.arch:
        generate_once()
    else:
        warm_up(plan.world_size + 1)
    first_group = [rank for rank in plan.ranks if rank < plan.group_size]  # whatever the first of them tells
    left: Left | None = None
    tracing = _Tracing(forks)
    for ended in tracing.first_group(first_group):
        if ended.rank == plan.ranks[0]:
            left = ended.left
            _import_once(left)
        yield ended
    is_told = plan.may_save() and left is not None and left.digest is not None and left.failed is None
    is_alike = is_told and left is not None and not left.reads
    ranks = plan.when_alike() if is_alike else plan.ranks
    has_starts = is_told and not is_alike and left is not None and left.is_told_by_start
    yield from tracing.others(ranks[len(first_group) :], has_starts=has_starts)


def _import_once(left: Left | None) -> None:
    """Import what a rank imported, for all ranks that are forked from now on."""
    for name in left.imported if left is not None else ():
        with suppress(ImportError):  # the rank tried it, too
            importlib.import_module(name)
    gc.freeze()


class _Tracing:
    """The ranks, and what those before them left."""

    def __init__(self, forks: Forks) -> None:
        self._forks, self._plan = forks, forks.plan
        self._has_starts = False
        self._starts: dict[str, int] = {}
        """Start -> the rank that was traced from it, and stands for the others."""
        self._contents: dict[int, str] = {}
        """Rank that was traced -> hash of what it compiled."""
        self._domains: defaultdict[str, set[str]] = defaultdict(set)
        """Domain -> hashes of what its ranks compiled."""
        self._groups: set[str] = set()
        self._alike: dict[int, Ended] = {}
        """Ranks that were not traced."""
        self._num_starts = 0

    def first_group(self, ranks: Sequence[int]) -> Iterator[Ended]:
        """Trace all of these ranks, and watch the first unless all of the job are traced in any case."""

        def ask(rank: int) -> Asked:
            is_first = rank == ranks[0]
            return Asked(
                is_first=is_first, is_watched=is_first and self._plan.may_save(), groups=frozenset(self._groups)
            )

        for ended in self._forks.run(ranks, ask):
            if ended.left is not None:
                self._groups.add(ended.left.groups)
            yield ended

    def others(self, ranks: Sequence[int], *, has_starts: bool) -> Iterator[Ended]:
        """Trace those that are traced in any case, then the others; those that were not traced come last."""
        self._has_starts = has_starts
        certain = [rank for rank in ranks if self._plan.is_certain(rank)]
        left_over = [rank for rank in ranks if not self._plan.is_certain(rank)]
        for these in (certain, left_over):
            for ended in self._forks.run(these, self._ask):
                if self._is_traced(ended):
                    yield ended
        # Ranks of a domain in which another one compiled something else are traced: a difference is shown by records of
        # both sides, which can be compared again.
        split = {domain for domain, contents in self._domains.items() if len(contents) > 1}
        domains = {rank: ended.left.domain if ended.left is not None else "" for rank, ended in self._alike.items()}
        doubtful = sorted(rank for rank, domain in domains.items() if domain in split)[:_MAX_CONFIRMED]
        for ended in self._forks.run(doubtful, lambda rank: Asked()):
            del self._alike[ended.rank]
            yield ended
        yield from self._alike.values()

    def _ask(self, rank: int) -> Asked:
        known = frozenset(self._groups)
        if not self._has_starts or self._plan.lowers(rank):
            return Asked(groups=known)
        return Asked(starts=self._starts, is_traced=self._plan.is_certain(rank), groups=known)

    def _is_traced(self, ended: Ended) -> bool:
        left = ended.left
        if left is None:
            return True
        self._groups.add(left.groups)
        if self._plan.lowers(ended.rank):
            return True
        content = left.content if left.same_as is None else self._contents[left.same_as]
        self._domains[left.domain].add(content)
        if left.same_as is not None:
            self._alike[ended.rank] = ended
            return False
        self._contents[ended.rank] = content
        if self._has_starts:
            self._learn(ended.rank, left)
        return True

    def _learn(self, rank: int, left: Left) -> None:
        """Keep the start of a rank that stands for others; of one that does not, see whether starts still help."""
        known = self._starts.get(left.start) if left.start else None
        if known is not None:
            # What was not visible at the start decided: it does for no other rank either.
            self._has_starts = self._contents[known] == left.content
            return
        if left.start and left.is_told_by_start:
            self._starts[left.start] = rank
        self._num_starts += 1
        self._has_starts = self._num_starts <= max(_MAX_STARTS + self._plan.group_size, len(self._alike))
