"""Counted regions of all ranks -> whether every rank enters each compiled callable as often as the others.

A rank that does not compile one of several equal modules compiles the same graphs as the others, so that no layer
differs: only the number of regions that its calls enter shows that it runs one of them in eager.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.groups.domain import by_domain
from tpcompile.evidence.iterables import find
from tpcompile.evidence.records import Check, CheckId, EnteredRegion, RankDigest, RankRecord, Status
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.normalise import short_path
from tpcompile.evidence.text.ranks import named_ranks

_BESIDE = "it issues no collective, so no rank waits in it"


def entered_regions(record: RankRecord) -> tuple[EnteredRegion, ...]:
    """What one rank entered, by phase and compiled callable."""
    issuing = {(compile_.phase, compile_.compile_id) for compile_ in record.compiles if compile_.collectives}
    names = [f"{one.target.function} {short_path(one.target.file)}:{one.target.line}" for one in record.regions]
    with_collectives = set()
    for name, count in zip(names, record.regions, strict=True):
        made = {(count.phase, compile_id.strip("[]")) for compile_id in count.compiled}
        if issuing & made:
            with_collectives.add(name)
    return tuple(
        EnteredRegion(
            phase=count.phase,
            name=name,
            line=count.target,
            entered=count.entered,
            hits=count.entered - len(count.compiled),
            has_collectives=name in with_collectives,
        )
        for name, count in zip(names, record.regions, strict=True)
    )


def entered_check(mode: str, digests: Sequence[RankDigest], *, phases: Iterable[str]) -> Check:
    """Check that in each phase the ranks of a domain enter a callable with collectives equally often."""
    differing = list(_differing(digests, tuple(phases)))
    red = find(differing, _has_collectives)
    details = [_text(regions) for regions in differing if regions is not red]
    is_counted = any(digest.regions for digest in digests)
    passed = Check(
        id=CheckId.ENTERED,
        mode=mode,
        status=Status.PASS if is_counted else Status.SKIPPED,
        expected="as many on every rank",
        observed="equal" if is_counted else "not counted",
        details=tuple(details),
    )
    if red is None:
        return passed
    most = max(region.entered for region in red.values())
    ranks = red.where(lambda region: region.entered < most).ranks
    cause = Cause.COMPILE_DISABLED
    return passed.changed(status=Status.FAIL, observed=_text(red), ranks=ranks, line=red.first.line, cause=cause)


def _differing(digests: Sequence[RankDigest], phases: Sequence[str]) -> Iterator[ByRank[EnteredRegion]]:
    """Callables that ranks of one domain entered a different number of times, with the counts of all its ranks."""
    for ranks in by_domain(digests).values():
        known: dict[tuple[str, str], dict[int, EnteredRegion]] = {}
        for digest in ranks:
            for one in digest.regions:
                counts = known.setdefault((one.phase, one.name), {})
                counts[digest.rank] = one
        for (phase, _), counts in known.items():
            *_, known_one = counts.values()
            none = known_one.changed(entered=0)
            regions = ByRank({digest.rank: none for digest in ranks} | counts)
            is_wanted = phase in phases
            if is_wanted and regions.differ(lambda region: region.entered):
                yield regions


def _text(regions: ByRank[EnteredRegion]) -> str:
    """`Block.forward app/model.py:3 is entered 3 times on rank 0, 2 times on rank 1 (in target/first)`."""
    sides = regions.map(lambda region: region.entered).sides()
    counts = ", ".join(f"{count} times on {named_ranks(ranks)}" for ranks, count in sides)
    text = f"{regions.first.name} is entered {counts} (in {regions.first.phase})"
    return text if _has_collectives(regions) else f"{text}; {_BESIDE}"


def _has_collectives(regions: ByRank[EnteredRegion]) -> bool:
    return any(region.has_collectives for region in regions.values())
