"""States of ranks, of which some are lost -> the finding for where they parted, by their collectives.

The one place in which the sentinel decides who left the common program. Which lines a rank executed is known to the
verdict only, which leads with the branch where they were recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tpcompile.evidence.timeline.align import align, left_out_alone
from tpcompile.evidence.timeline.label import label
from tpcompile.evidence.timeline.parting import Parting, Why
from tpcompile.evidence.timeline.stream import How, Stream
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.situation import Lost
from tpcompile.sentinel.streams import by_role, streams_of

Domains = Sequence[Collection[int]]
"""Ranks that run the same program, by domain; empty where all ranks do."""


def parted(
    states: Mapping[int, RankState],
    lost: Mapping[int, Lost] | None = None,
    domains: Domains = (),
    *,
    are_stuck: bool = False,
) -> Finding | None:
    """The finding for the first place at which these ranks parted; None where they did the same as far as is known.

    Of ranks that `are_stuck` one may also have left out what another one waits for, though they have nothing in common
    that could be compared.
    """
    streams = streams_of(states, lost or {})
    parting = align(streams, domains) or (left_out_alone(streams) if are_stuck else None)
    if parting is None or (len(domains) > 1 and not parting.odd):
        across = align({rank: by_role(stream) for rank, stream in streams.items()}, domains) if domains else None
        # Where fewer ranks than half stand in what the others did not do there. Stages of a pipeline may run different
        # programs: a difference after which a rank went on is none.
        odd = across.odd_side.events if across is not None and across.why == Why.MAJORITY else ()
        parting = across if len(odd) == 1 and not odd[0].is_done else parting
    if parting is None or (not parting.odd and _parted_before(parting, streams)):
        return None
    return _finding(parting)


def _parted_before(parting: Parting, streams: Mapping[int, Stream]) -> bool:
    """True where the ranks differ in the first thing that is known of them: they parted before."""
    cut = [streams[rank] for rank in parting.starts if not streams[rank].is_whole]
    return parting.before is None and any(stream.how != How.ABORTED for stream in cut)


def _finding(parting: Parting) -> Finding:
    found = label(parting)
    return Finding(
        found.cause, found.says, found.ranks, found.line, is_rank_known=bool(parting.odd),
        is_by_past=parting.why in (Why.OWN_PAST, Why.END), left_out=parting.left_out,
    )  # fmt: skip
