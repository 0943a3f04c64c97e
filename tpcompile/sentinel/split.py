"""How each rank enters its compiled callables -> ranks that alone run one of them region by region: pure.

A graph break in a loop makes Dynamo skip a code object for the life of the process: what is compiled is its parts then,
and where these hold no collective no rank waits for another. Ranks are compared at the calls that were whole on both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tpcompile.evidence.byrank import ByRank, by_name
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import SkippedFrame
from tpcompile.evidence.several import first
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.sentinel.finding import Finding, fewer_of, first_finding
from tpcompile.sentinel.marks import Counted
from tpcompile.sentinel.regionlines import frames_inside

_ADVICE = (
    "fullgraph=True does not help: Dynamo skips the code object for the life of the process, whichever instance broke "
    "its graph; torch.compiler.reset() after the call that broke it makes Dynamo forget",
)


def split_alone(by_rank: Mapping[int, Mapping[str, Counted]]) -> Finding | None:
    """The first region that some ranks run in parts, at a call that others made as one."""
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
    """The first region that some ranks compiled, and whose function others run as it is, with a part of it compiled.

    Only of ranks that leave: one that runs the function as it is now, in an evaluation, may compile it later.
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
    """What the rank compiled, and those others did not, while it was inside the function of that region."""
    own = [counted for name, counted in table.items() if counted.is_over and name not in of_others]
    return first(counted for counted in own if frames_inside(counted.stack[::-1], region, table))


def _why(skipped: SkippedFrame) -> str:
    name = skipped.line.function
    if skipped.broke_at is None:
        return f"{name} is skipped and runs in Python at {skipped.line}"
    return f"{name} is skipped since a graph break at {skipped.broke_at}, earlier in this process"
