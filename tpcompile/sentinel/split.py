"""How each rank enters its compiled callables -> ranks that alone run one of them region by region: pure.

A graph break in a loop makes Dynamo skip a code object for the life of the process: what is compiled is its parts then,
and where these hold no collective no rank waits for another. Ranks are compared at the calls that were whole on both.
"""

from __future__ import annotations

from collections.abc import Mapping

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import SkippedFrame
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.marks import Counted

_ADVICE = (
    "fullgraph=True does not help: Dynamo skips the code object for the life of the process, whichever instance broke "
    "its graph; torch.compiler.reset() after the call that broke it makes Dynamo forget",
)


def split_alone(by_rank: Mapping[int, Mapping[str, Counted]]) -> Finding | None:
    """The first region that some ranks run in parts, at a call that others made as one."""
    for region in sorted(set().union(*by_rank.values())):
        known = {rank: found[region] for rank, found in sorted(by_rank.items()) if region in found}
        split = {rank: one for rank, one in known.items() if one.skipped is not None}
        whole = [rank for rank, one in known.items() if one.skipped is None]
        if split and any(known[rank].calls > min(one.calls for one in split.values()) for rank in whole):
            return _describe(region, split, whole)
    return None


def _describe(region: str, split: Mapping[int, Counted], whole: list[int]) -> Finding:
    one = next(iter(split.values()))
    assert one.skipped is not None, "picked by split_alone"
    observed = (
        f"rank {ranks_text(list(split))} runs {region} in several compiled regions, rank {ranks_text(whole)} in one: "
        f"{_why(one.skipped)}"
    )
    broke_at = one.skipped.broke_at
    cause = Cause.GRAPH_BREAK if broke_at else Cause.REGIONAL_COMPILE
    return Finding(cause, observed, tuple(split), broke_at or one.skipped.line, _ADVICE)


def _why(skipped: SkippedFrame) -> str:
    name = skipped.line.function
    if skipped.broke_at is None:
        return f"{name} is skipped and runs in Python at {skipped.line}"
    return f"{name} is skipped since a graph break at {skipped.broke_at}, earlier in this process"
