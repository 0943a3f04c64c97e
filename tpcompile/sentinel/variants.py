"""The compiled variant that each call of a region ran, on each rank -> the first call that differs: pure.

A rank that runs a different variant than its peers does not compile, nor hang if both issue the same collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tpcompile.evidence.groups.by_rank import ByRank, by_name
from tpcompile.evidence.records import Frozen, UserLine
from tpcompile.evidence.records.bounds import Number
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.finding import Finding, first_finding
from tpcompile.sentinel.progress import Progress

_MAX_CALLABLES = 1000


class Ran(Frozen):
    """The variants of one region that one rank ran."""

    region: str
    line: UserLine | None = None
    """The user's call."""
    first_calls: tuple[Number, ...] = ()
    """The first call of each compiled callable of that function."""
    variants: dict[Number, str] = {}
    """Call -> position at which its variant was compiled, or its compile id if unknown; the last calls."""


def ran_by(progress: Progress) -> dict[str, Ran]:
    """What this rank ran of regions with collectives: only their call numbers correspond on all ranks."""
    found: dict[str, Ran] = {}
    for region in progress.compared():
        if region.ran and region.num_collectives:
            variants = {call: region.variants.get(compile_id, compile_id) for call, compile_id in region.ran.copy()}
            firsts = tuple(region.first_calls[:_MAX_CALLABLES])
            found[region.name] = Ran(region=region.name, line=region.line, variants=variants, first_calls=firsts)
    return found


def wrong_variant(by_rank: Mapping[int, Mapping[str, Ran]]) -> Finding | None:
    """The first call of a region in which ranks ran different variants, all of which every rank has."""
    return first_finding(_in_region, by_name(by_rank))


def _in_region(ran: ByRank[Ran]) -> Finding | None:
    calls = set.intersection(*(set(one.variants) for one in ran.values()))
    return first_finding(lambda call: _at_call(ran, call), sorted(calls))


def _at_call(ran: ByRank[Ran], call: int) -> Finding | None:
    taken = ran.map(lambda one: one.variants[call])
    if not taken.differ(str):
        return None
    wanted = set(taken.values())
    every_rank_has = all(wanted.issubset(one.variants.values()) for one in ran.values())
    return _describe(ran, call, taken) if every_rank_has else None


def _describe(ran: ByRank[Ran], call: int, taken: ByRank[str]) -> Finding:
    called = ran.map(lambda one: sum(first <= call for first in one.first_calls))
    if called.differ():
        return _uncompiled(ran, call, called)
    odd = taken.unlike_majority(str) or _rare(ran, taken) or taken.ranks
    # A variant is named by its first call.
    firsts = {
        rank: min(of for of, one in ran[rank].variants.items() if one == variant) for rank, variant in taken.items()
    }
    says = ", ".join(f"rank {rank} the variant of call {first}" for rank, first in firsts.items())
    observed = (
        f"in call {call} of {ran.first.region} the ranks ran different variants of it: {says}; "
        f"unusual on {named_ranks(odd)}"
    )
    return Finding(Cause.WRONG_VARIANT, observed, odd, ran[odd[0]].line)


def _uncompiled(ran: ByRank[Ran], call: int, called: ByRank[int]) -> Finding:
    """Ranks that have called fewer compiled callables of one function: the calls of the ranks do not correspond."""
    fewer = called.where(lambda number: number < max(called.values())).ranks
    says = ", ".join(f"rank {rank} {number}" for rank, number in called.items())
    observed = (
        f"up to call {call} of {ran.first.region} the ranks called different numbers of compiled callables of it: "
        f"{says}; {named_ranks(fewer)} ran one without compiling it, or not at all"
    )
    return Finding(Cause.COMPILE_DISABLED, observed, fewer, ran[fewer[0]].line)


def _rare(ran: ByRank[Ran], taken: ByRank[str]) -> tuple[int, ...]:
    """Ranks that ran a variant which is run less often, over all ranks, than those of the other ranks."""
    times = Counter[str]()
    for one in ran.values():
        times.update(one.variants.values())
    by_rank = taken.map(lambda variant: times[variant])
    most = max(by_rank.values())
    return by_rank.where(lambda number: number < most).ranks
