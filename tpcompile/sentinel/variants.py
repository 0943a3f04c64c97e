"""Which of its compiled variants a region ran, call by call, on each rank -> the first call that differs: pure.

Nothing compiles when a rank takes another variant than its peers, and nothing hangs where both issue the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import Frozen, UserLine
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.progress import Progress


class Ran(Frozen):
    """What one rank ran of one region."""

    region: str
    line: UserLine | None = None
    """The user's call."""
    variants: dict[int, str] = {}
    """Call -> hash of what was compiled, or the number of the variant where nobody saw it compiled; the last calls."""


def ran_by(progress: Progress) -> dict[str, Ran]:
    """What this rank ran of regions with collectives: only of those call numbers mean the same on all ranks."""
    found = {}
    for name, region in list(progress.regions.items()):
        if not region.ran or not region.num_collectives or region.reason_uneven or region.is_reported:
            continue
        variants = {call: region.programs.get(compile_id, compile_id) for call, compile_id in region.ran.copy()}
        found[name] = Ran(region=name, line=region.line, variants=variants)
    return found


def wrong_variant(by_rank: Mapping[int, Mapping[str, Ran]]) -> Finding | None:
    """The first call of a region in which ranks ran different variants that all of them have."""
    regions = sorted(set().union(*by_rank.values()))
    for region in regions:
        ran = {rank: found[region] for rank, found in sorted(by_rank.items()) if region in found}
        found = _in_region(ran) if len(ran) > 1 else None
        if found is not None:
            return found
    return None


def _in_region(ran: Mapping[int, Ran]) -> Finding | None:
    known = [set(one.variants.values()) for one in ran.values()]
    everywhere = set.intersection(*known)
    common = set.intersection(*(set(one.variants) for one in ran.values()))
    for call in sorted(common):
        taken = {rank: one.variants[call] for rank, one in ran.items()}
        if len(set(taken.values())) > 1 and set(taken.values()) <= everywhere:
            return _describe(ran, call, taken)
    return None


def _describe(ran: Mapping[int, Ran], call: int, taken: Mapping[int, str]) -> Finding:
    odd = _minority(taken) or _rare(ran, taken) or tuple(taken)
    one = next(iter(ran.values()))
    says = ", ".join(f"rank {rank} {_name(ran[rank], variant)}" for rank, variant in taken.items())
    observed = (
        f"in call {call} of {one.region} the ranks ran different variants of it: {says}; "
        f"rank {ranks_text(odd)} did what is unusual"
    )
    return Finding(Cause.WRONG_VARIANT, observed, odd, ran[odd[0]].line)


def _minority(taken: Mapping[int, str]) -> tuple[int, ...]:
    """Ranks beside those of a strict majority."""
    variants = list(taken.values())
    usual = max(variants, key=variants.count)
    if 2 * variants.count(usual) <= len(variants):
        return ()
    return tuple(rank for rank, variant in taken.items() if variant != usual)


def _rare(ran: Mapping[int, Ran], taken: Mapping[int, str]) -> tuple[int, ...]:
    """Ranks that took a variant which all ranks run less often than what the others took."""
    every = [variant for one in ran.values() for variant in one.variants.values()]
    times = {rank: every.count(variant) for rank, variant in taken.items()}
    most = max(times.values())
    return tuple(rank for rank, count in times.items() if count < most)


def _name(ran: Ran, variant: str) -> str:
    """Say since when the rank has had it: hashes mean nothing to a person."""
    first = min(call for call, one in ran.variants.items() if one == variant)
    return f"the one of call {first}"
