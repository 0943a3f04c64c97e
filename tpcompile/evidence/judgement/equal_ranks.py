"""Differences of a verdict -> the groups of equal ranks in each domain, and one line for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tpcompile.evidence.groups.by_rank import ByRank, Groups
from tpcompile.evidence.records import Divergence, Verdict
from tpcompile.evidence.text.ranks import ranks_text


def equal_groups(domains: Mapping[str, Sequence[int]], found: Iterable[Divergence]) -> dict[str, Groups]:
    """Domain -> groups of its ranks that no red difference separates.

    What is declared or differs by nature separates no ranks: a verdict that passes has one group in each domain.
    """
    red = [divergence for divergence in found if divergence.is_red]
    return {name: _groups(name, ranks, red) for name, ranks in sorted(domains.items())}


def _groups(name: str, ranks: Sequence[int], red: Sequence[Divergence]) -> Groups:
    separating = [divergence for divergence in red if divergence.domain in ("", name)]
    sides = {rank: tuple(_side(rank, divergence) for divergence in separating) for rank in ranks}
    return ByRank(sides).groups()


def _side(rank: int, divergence: Divergence) -> int:
    """Number of the group that the rank is in; -1 for a rank that the difference is not about."""
    numbers = (number for number, group in enumerate(divergence.groups) if rank in group.ranks)
    return next(numbers, -1)


def equal_ranks(verdict: Verdict) -> list[tuple[str, bool]]:
    """For each domain `equal ranks in tp: 0-1 | 2`, and True where its ranks are not equal."""
    return [_line(verdict, domain, groups) for domain, groups in sorted(verdict.domains.items())]


def _line(verdict: Verdict, domain: str, groups: Groups) -> tuple[str, bool]:
    text = " | ".join(ranks_text(group) for group in groups)
    here = [one for one in verdict.divergences if one.domain == domain]
    accepted = [one for one in here if not one.is_red]
    is_split = len(groups) > 1
    note = " (all equal)"
    if accepted:
        note = f" (but for {len(accepted)} accepted)"
    if is_split:
        note = ""
    return f"equal ranks in {domain}: {text}{note}", is_split
