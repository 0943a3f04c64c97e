"""Logs of ranks that must agree -> the ranks whose log lacks a record that their peers have.

A log has no count of its records. Where two ranks compiled the same frame, one with a lowered graph, generated code or
a schedule that the other has no trace of, and which it did not load from a cache, that record was not observed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tpcompile.evidence.compiles.contradictions import CODE
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.logs.compiled import Frame, LoggedCompile
from tpcompile.evidence.logs.ranklog import RankLog


def fewer_records(logs: ByRank[RankLog]) -> tuple[set[int], set[int]]:
    """Ranks that lack a record which a peer has of the same compile, or of the job; and those of them of which it is
    unknown whether they lowered the graph at all.

    A compile that lacks it is damaged where a peer traced the same program; a different program may have been lowered
    differently, too, and what was traced is compared.
    """
    found, unknown = set[int](), set[int]()
    for has in (lambda log: log.executions, lambda log: log.torch_version):
        having = logs.where(has)
        found |= set(logs).difference(having) if having else set()
    for turn in list(_turns(logs)):
        traced = turn.where(lambda compile_: "dynamo_output_graph" in compile_.names)
        lacking = _lacking(traced)
        programs = {compile_.program for compile_ in traced.without(lacking).values()}
        for rank, compile_ in lacking.items():
            if compile_.program in programs and not compile_.fail_type:
                logs[rank].lost(compile_)
        found.update(lacking)
        # neither the metrics nor any lowered graph says how far these were lowered
        unknown.update(lacking.where(lambda compile_: not (compile_.lowered and compile_.says_how_lowered)))
    return found, unknown


def _turns(logs: ByRank[RankLog]) -> Iterator[ByRank[LoggedCompile]]:
    """The first, second, ... compile of every frame on the ranks that made it and logged its end."""
    by_turn: dict[tuple[Frame, int], dict[int, LoggedCompile]] = {}
    for rank, log in logs.items():
        for frame, compiles in log.by_frame.items():
            for number, compile_ in enumerate(compiles):
                turn = by_turn.setdefault((frame, number), {})
                turn[rank] = compile_
    for made in by_turn.values():
        yield ByRank(made).where(lambda compile_: compile_.is_ended)


def _lacking(turn: ByRank[LoggedCompile]) -> ByRank[LoggedCompile]:
    """Ranks whose compile has fewer records than that of one peer, and none that the peer's does not have."""
    if not turn.differ(lambda compile_: compile_.lowered):
        return ByRank({})
    lowered = [Counter(compile_.lowered) for compile_ in turn.values()]
    return turn.where(lambda compile_: any(_has_lost(compile_, peer) for peer in lowered))


def _has_lost(compile_: LoggedCompile, peer: Counter[str]) -> bool:
    """True when neither a cache, nor its backend, nor a different program is the reason for what a peer has more."""
    own = Counter(compile_.lowered)
    is_loaded = any(name.endswith("_hit") for name in compile_.names)
    if is_loaded or not own < peer:
        return False
    is_other_backend = CODE in peer.keys() - own.keys()
    return not (is_other_backend and compile_.says_how_lowered)
