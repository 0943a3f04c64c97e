"""States of ranks that wait for each other -> the rank that left the common order, where the evidence decides: pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.finding import Finding, first_finding
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.order import left_the_order
from tpcompile.sentinel.own_sequence import surprise
from tpcompile.sentinel.parting import parting_by_evidence


def who_deviated(domains: Sequence[ByRank[RankState]], ranks: Collection[int]) -> Finding | None:
    """The finding that blames some of `ranks`, or a rank of their domains; None where nothing tells them apart.

    Ranks of one domain run the same program, so the numbers and lines of their collectives are compared.
    """
    everyone = ByRank({rank: state for domain in domains for rank, state in domain.items()})
    here = [domain for domain in domains if not domain.keys().isdisjoint(ranks)]
    return left_the_order(everyone) or first_finding(parting_by_evidence, here) or _own_order(everyone.among(ranks))


def _own_order(states: ByRank[RankState]) -> Finding | None:
    """The finding for ranks that left their own earlier order, if not all did."""
    odd = states.some(deviates)
    return _left_its_order(states[odd[0]], odd) if odd else None


def _left_its_order(here: RankState, odd: tuple[int, ...]) -> Finding:
    says = f"rank {here.rank} left its own order of collectives with {here.latest}"
    return Finding(Cause.STUCK_COLLECTIVE, says, odd, here.latest.line if here.latest else here.line)


def deviates(state: RankState) -> bool:
    """True when a different collective, of any group, followed the same predecessors before."""
    in_order = sorted(state.issued, key=lambda issued: issued.age_s, reverse=True)
    until = in_order.index(state.latest) if state.latest else 0
    return until > 0 and surprise([issued.key for issued in in_order], until, range(until)) > 0
