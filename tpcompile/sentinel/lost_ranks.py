"""Ranks that did not answer, states of the remaining ranks -> how they were lost, and the rank to blame: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first, grouped
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.parted import parted
from tpcompile.sentinel.situation import Lost, Situation


def lost_ranks(situation: Situation) -> Finding | None:
    """The finding for ranks that are given up."""
    dead = situation.lost.where(lambda gone: gone.is_final)
    if not dead:
        return None
    found = _found(dead, situation.now)
    return replace(found, gone=dead.ranks)


def _found(dead: ByRank[Lost], states: ByRank[RankState]) -> Finding:
    waiting = states.where(lambda state: state.waits_at or state.in_flight)
    says = "; ".join(_texts(dead, states))
    if waiting:
        says += f"; waiting: {named_ranks(waiting.ranks)}"
    aborted = dead.where(lambda gone: gone.aborted).where(_line)
    cause = dead.first.cause
    if aborted and cause == Cause.KILLED:
        # gloo aborts the rank that receives more bytes than it expects, which may be the rank that is right
        found = parted(states, aborted)
        if found is not None:
            cause = found.cause if found.is_rank_known else Cause.COLLECTIVE_SIZES  # what gloo aborts for
            return replace(found, cause=cause, observed=f"{says}; {found.observed}")
        says += "; communication ended it, with ranks that are not compared here: sizes do not fit"
        everyone = tuple(sorted({*dead, *states}))
        return Finding(Cause.COLLECTIVE_SIZES, says, everyone, aborted.first.line, is_rank_known=False)
    lines = [*dead.found(_line).values(), *waiting.found(_line).values()]
    return Finding(cause, says, dead.ranks, first(lines))


def _texts(dead: ByRank[Lost], states: ByRank[RankState]) -> list[str]:
    """One for each rank; one for a host of which no rank answers, while ranks of others do."""
    answering = {state.host for state in states.values()}
    silent = dead.where(lambda gone: gone.how == "silent" and gone.host != "" and gone.host not in answering)
    by_host = grouped(silent.values(), lambda gone: gone.host) if answering else {}
    away = {gone.rank for alike in by_host.values() for gone in alike}
    texts = [_unreachable(host, alike) for host, alike in by_host.items()]
    return [*texts, *(str(gone) for rank, gone in dead.items() if rank not in away)]


def _unreachable(host: str, silent: Sequence[Lost]) -> str:
    since = f"since {silent[0].since}"
    if len(silent) == 1:  # a process that is stopped there looks the same
        return f"rank {silent[0].rank}, the only one on {host}, does not answer {since}"
    ranks = named_ranks([gone.rank for gone in silent])
    return f"{host} is unreachable {since}: its {ranks} do not answer"


def _line(one: Lost | RankState) -> UserLine | None:
    return one.line
