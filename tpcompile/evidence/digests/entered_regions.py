"""Counted regions of all ranks -> whether every rank enters each compiled callable as often as the others.

A rank that does not compile one of several equal modules compiles the same graphs as the others, so that no layer
differs: only the number of regions that its calls enter shows that it runs one of them in eager.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.groups.domain import by_domain
from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import Check, EnteredRegion, RankDigest, RankRecord, RegionCount, Status
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.normalise import short_path
from tpcompile.evidence.text.ranks import named_ranks

NAME = "compiled regions entered, equal on all ranks"
_BESIDE = "it issues no collective, so no rank waits in it"


def entered_regions(record: RankRecord) -> tuple[EnteredRegion, ...]:
    """What one rank entered, by phase and compiled callable."""
    issuing = {(compile_.phase, compile_.compile_id) for compile_ in record.compiles if compile_.collectives}
    named = {_name(count) for count in record.regions if issuing.intersection(_compiles(count))}
    return tuple(_entered(count, has_collectives=_name(count) in named) for count in record.regions)


def entered_check(mode: str, digests: Sequence[RankDigest], *, phases: Iterable[str]) -> Check:
    """Check that in each phase the ranks of a domain enter a callable with collectives equally often."""
    differing = list(_differing(digests, tuple(phases)))
    red = find(differing, _has_collectives)
    is_counted = any(digest.regions for digest in digests)
    passed = Check(
        name=NAME,
        mode=mode,
        status=Status.PASS if is_counted else Status.SKIPPED,
        expected="as many on every rank",
        observed="equal" if is_counted else "not counted",
        details=_details(differing, red),
    )
    if red is None:
        return passed
    most = max(region.entered for region in red.values())
    failed = {
        "status": Status.FAIL,
        "observed": _text(red),
        "ranks": red.where(lambda region: region.entered < most).ranks,
        "line": red.first.line,
        "cause": Cause.COMPILE_DISABLED,
    }
    return passed.model_copy(update=failed)


def _details(differing: Sequence[ByRank[EnteredRegion]], red: ByRank[EnteredRegion] | None) -> tuple[str, ...]:
    return tuple(_detail(regions) for regions in differing if regions is not red)


def _differing(digests: Sequence[RankDigest], phases: Sequence[str]) -> Iterator[ByRank[EnteredRegion]]:
    """Callables that ranks of one domain entered a different number of times, with the counts of all its ranks."""
    for ranks in by_domain(digests).values():
        tables = {digest.rank: {(one.phase, one.name): one for one in digest.regions} for digest in ranks}
        known = {key: one for table in tables.values() for key, one in table.items() if one.phase in phases}
        for key, one in known.items():
            none = one.model_copy(update={"entered": 0})
            regions = ByRank({rank: table.get(key, none) for rank, table in tables.items()})
            if regions.differ(lambda region: region.entered):
                yield regions


def _text(regions: ByRank[EnteredRegion]) -> str:
    """`Block.forward app/model.py:3 is entered 3 times on rank 0, 2 times on rank 1 (in target/first)`."""
    sides = regions.map(lambda region: region.entered).sides()
    counts = ", ".join(f"{count} times on {named_ranks(ranks)}" for ranks, count in sides)
    return f"{regions.first.name} is entered {counts} (in {regions.first.phase})"


def _detail(regions: ByRank[EnteredRegion]) -> str:
    return _text(regions) if _has_collectives(regions) else f"{_text(regions)}; {_BESIDE}"


def _has_collectives(regions: ByRank[EnteredRegion]) -> bool:
    return any(region.has_collectives for region in regions.values())


def _entered(count: RegionCount, *, has_collectives: bool) -> EnteredRegion:
    return EnteredRegion(
        phase=count.phase,
        name=_name(count),
        line=count.target,
        entered=count.entered,
        hits=count.entered - len(count.compiled),
        has_collectives=has_collectives,
    )


def _name(count: RegionCount) -> str:
    return f"{count.target.function} {short_path(count.target.file)}:{count.target.line}"


def _compiles(count: RegionCount) -> set[tuple[str, str]]:
    return {(count.phase, compile_id.strip("[]")) for compile_id in count.compiled}
