"""Situation -> why the ranks do not progress, or None while a rank may still arrive: pure, no store, no clock.

Nothing here depends on how long a rank takes: a rank that compiles or runs the user's own code may arrive, and its
peers wait. A finding needs a rank that cannot arrive: its process has ended, it has left, it issued a different
collective under the same number, or it waits for a rank that waits for it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from operator import methodcaller

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.describe import describe
from tpcompile.sentinel.exited_ranks import waits_for_exited
from tpcompile.sentinel.finding import Finding, first_finding
from tpcompile.sentinel.lost_ranks import lost_ranks
from tpcompile.sentinel.messages import Issued, RankState
from tpcompile.sentinel.one_sided_compile import Pair, one_sided_compile
from tpcompile.sentinel.parted import parted
from tpcompile.sentinel.situation import Finder, Situation
from tpcompile.sentinel.waits import Wait, mutual_waits
from tpcompile.sentinel.wrong_group import unlike_members, wrong_group


def why_stuck(situation: Situation) -> Finding | None:
    """The first finding of `FINDERS`, with one line per rank on what it does."""
    found = first_finding(lambda find: find(situation), FINDERS)
    details = tuple(map(describe, situation.now.values()))
    return replace(found, details=details) if found is not None else None


def calls_parted(here: RankState, theirs: RankState) -> Finding | None:
    """The call that only one of two ranks made before one of them compiled alone."""
    found = parted({here.rank: here, theirs.rank: theirs})
    return found if found is not None and found.cause == Cause.CALL_COUNT else None


def mismatch(situation: Situation) -> Finding | None:
    """Ranks issued different collectives under one number of a group, and a rank is stuck at or after it."""
    known = ByRank({**situation.other_domains, **situation.now})
    groups = sorted({issued.group for issued in situation.stuck.values()})
    unlike = first(filter(None, (_unlike_in(known, group) for group in groups)))
    return (parted(known, domains=situation.domains) or _unlike(unlike)) if unlike is not None else None


def _unlike_in(states: ByRank[RankState], group: str) -> ByRank[Issued] | None:
    """The collectives of the ranks under the first number of a group under which they are not the same."""
    numbered = states.map(lambda state: {one.seq: one for one in state.issued_in(group)})
    numbers = sorted(set[int]().union(*numbered.values()))
    met = (numbered.found(methodcaller("get", number)) for number in numbers)
    return first(here for here in met if here.differ(_what))


def _unlike(here: ByRank[Issued]) -> Finding:
    ranks, is_known = here.blamed(_what)
    line = here[here.unlike_most(_what)[0]].line
    says = ", ".join(f"{named_ranks(alike)} in {here[alike[0]]}" for alike in here.groups(_what))
    observed = f"the ranks are in different collectives: {says}"
    return Finding(Cause.STUCK_COLLECTIVE, observed, ranks, line, is_rank_known=is_known)


def _what(issued: Issued) -> str:
    return issued.what


def cycle(situation: Situation) -> Finding | None:
    """Two ranks wait for each other."""
    return first_finding(lambda pair: _of_pair(situation, *pair), mutual_waits(situation))


def _of_pair(situation: Situation, wait: Wait, back: Wait) -> Finding | None:
    states = situation.now
    for mine, theirs in ((wait, back), (back, wait)):
        compiled_at = states[mine.rank].waits_at
        if compiled_at is not None:
            return one_sided_compile(Pair(states, states[mine.rank], compiled_at, states[theirs.rank], theirs.what))
    says = f"rank {wait.rank} waits {wait.what}; rank {back.rank} waits {back.what}"
    explained = parted({**situation.other_domains, **states}, domains=situation.domains, are_stuck=True)
    if explained is not None:
        return replace(explained, observed=f"{explained.observed}; {says}")
    p2p = states[wait.rank].p2p or states[back.rank].p2p
    if p2p is not None:
        return Finding(Cause.STUCK_COLLECTIVE, says, (p2p.peer,), p2p.line)
    ranks = states.among([wait.rank, back.rank]).ranks
    return Finding(Cause.STUCK_COLLECTIVE, says, ranks, states[ranks[0]].line, is_rank_known=False)


def crossed(situation: Situation) -> Finding | None:
    """Two ranks issued collectives of two groups in opposite order, and each GPU waits in its first one."""
    return first_finding(lambda pair: _crossed_by(situation, *pair), combinations(situation.stuck, 2))


def _crossed_by(situation: Situation, a: int, b: int) -> Finding | None:
    states = situation.now
    first_of_a = situation.stuck[a]
    first_of_b = situation.stuck[b]
    second_of_a = _in_flight(states[a], first_of_b)
    second_of_b = _in_flight(states[b], first_of_a)
    if first_of_a.group == first_of_b.group or second_of_a is None or second_of_b is None:
        return None
    if _may_be_joined(first_of_a, states) or _may_be_joined(first_of_b, states):
        return None
    says = f"rank {a} issued {first_of_a} before {second_of_a}; rank {b} issued them in the opposite order"
    return Finding(Cause.STUCK_COLLECTIVE, says, (a, b), first_of_b.line)


def _in_flight(state: RankState, wanted: Issued) -> Issued | None:
    return first(issued for issued in state.in_flight if issued.id == wanted.id)


def _may_be_joined(wanted: Issued, states: ByRank[RankState]) -> bool:
    """True while a rank of the group may still issue it."""
    members = states.where(lambda state: wanted.group in state.groups)
    return len(members.where(lambda state: state.has_issued(wanted))) < len(members)


def standstill(situation: Situation) -> Finding | None:
    """All ranks wait in communication, and none of them does anything: one sends what no other one receives.

    Sources or split sizes may differ in collectives of one number; torch's flight recorder does not have them. Nothing
    is said where a rank that is not among these is in one of the groups: it may be late.
    """
    now, stuck = situation.now, situation.stuck
    awaited = {rank for state in now.values() for rank in state.waits_with}
    if situation.lost or len(now) < 2 or not awaited <= set(now) or not all(map(situation.is_idle, now)):
        return None
    met = stuck.where(lambda issued: not any(state.can_still_join(issued.group, issued.seq) for state in now.values()))
    if not met:
        return None
    says = ", ".join(f"rank {rank} in {issued}" for rank, issued in met.items())
    observed = f"all ranks wait and none ends; {says}, which all of its ranks have issued: its source or sizes differ"
    explained = parted(now, are_stuck=True)
    if explained is not None:
        return replace(explained, observed=f"{explained.observed}; {observed}")
    line, are_few = met[met.ranks[0]].line, 2 * len(met) < len(now)
    return Finding(Cause.STUCK_COLLECTIVE, observed, met.ranks, line, is_rank_known=are_few)


FINDERS: tuple[Finder, ...] = (
    lost_ranks, unlike_members, mismatch, waits_for_exited, wrong_group, cycle, crossed, standstill,
)  # fmt: skip
"""Rules in order, the most specific first."""
