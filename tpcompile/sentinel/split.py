"""How ranks enter their compiled callables -> ranks on which one of them runs as several compiled regions: pure.

A graph break in a loop makes Dynamo skip a code object for the life of the process, so that only its parts are
compiled. If these contain no collective, no rank waits. Ranks are compared at calls that ran as one region on both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tpcompile.evidence.groups.by_rank import ByRank, by_name
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import SkippedFrame
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.counter_samples import Counted
from tpcompile.sentinel.finding import Finding, fewer_of, first_finding
from tpcompile.sentinel.region_lines import frames_inside

_ADVICE = (
    "fullgraph=True does not help: Dynamo skips the code object for the life of the process, whichever instance broke "
    "its graph; torch.compiler.reset() after the call that broke it clears that",
)


def split_alone(by_rank: Mapping[int, Mapping[str, Counted]]) -> Finding | None:
    """The first region that some ranks run as several regions, at a call that other ranks ran as one."""
    return first_finding(_in_region, by_name(by_rank))


def _in_region(counted: ByRank[Counted]) -> Finding | None:
    split = counted.where(lambda one: one.skipped)
    whole = counted.without(split)
    last_common = min(split.map(lambda one: one.calls).values(), default=0)
    went_on = whole.where(lambda one: one.calls > last_common)
    if not split or not went_on:
        return None
    skipped = split.found(lambda one: one.skipped).first
    observed = (
        f"{named_ranks(split.ranks)} ran {split.first.region} in several compiled regions, "
        f"{named_ranks(whole.ranks)} in one: {_why(skipped)}"
    )
    broke_at = skipped.broke_at
    cause = Cause.GRAPH_BREAK if broke_at else Cause.REGIONAL_COMPILE
    return Finding(cause, observed, split.ranks, broke_at or skipped.line, _ADVICE)


def parts_alone(by_rank: Mapping[int, Mapping[str, Counted]]) -> Finding | None:
    """The first region that some ranks compiled, while other ranks run its function eager and compiled a part of it.

    Only for ranks that leave: a rank that runs the function eager now, in an evaluation, may compile it later.
    """
    tables = ByRank(by_rank)
    names = sorted(set[str]().union(*tables.values()))
    return first_finding(lambda region: _whole_and_part(region, tables), names)


def _whole_and_part(region: str, tables: ByRank[Mapping[str, Counted]]) -> Finding | None:
    whole = tables.where(lambda table: region in table)
    known = set[str]().union(*whole.values())
    part = tables.without(whole).found(lambda table: _part_of(region, table, known))
    if not part:
        return None
    observed = (
        f"{named_ranks(whole.ranks)} compiled {region}; {named_ranks(part.ranks)} ran that function without "
        f"compiling it, and compiled {part.first.region} inside it"
    )
    odd = fewer_of(whole.ranks, part.ranks)
    return Finding(Cause.REGIONAL_COMPILE, observed, odd, part.first.line)


def _part_of(region: str, table: Mapping[str, Counted], of_others: Collection[str]) -> Counted | None:
    """A region that this rank compiled inside the function of `region`, and the other ranks did not."""
    own = [counted for name, counted in table.items() if counted.is_over and name not in of_others]
    return first(counted for counted in own if frames_inside(counted.stack[::-1], region, table))


def _why(skipped: SkippedFrame) -> str:
    name = skipped.line.function
    if skipped.broke_at is None:
        return f"{name} is skipped and runs in Python at {skipped.line}"
    return f"{name} is skipped since a graph break at {skipped.broke_at}, earlier in this process"
