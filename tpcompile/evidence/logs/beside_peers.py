"""Logs of ranks that must agree -> the ranks whose log lacks a record that their peers have.

A log has no count of its records. Where two ranks compiled the same frame, one with a lowered graph, generated code or
a schedule that the other has no trace of, and which it did not load from a cache, that record was not observed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from tpcompile.evidence.compiles.story import CODE
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.logs.compiled import Frame, LoggedCompile
from tpcompile.evidence.logs.ranklog import RankLog


def missing_frames(logs: ByRank[RankLog]) -> set[int]:
    """Ranks without any compile of frames whose numbers are not missing on all ranks: torch may count one silently."""
    missing = [log.missing for log in logs.values()]
    everywhere = frozenset.intersection(*missing)
    return set(logs.where(lambda log: log.missing - everywhere))


def fewer_records(logs: ByRank[RankLog]) -> tuple[set[int], set[int]]:
    """Ranks that lack a record which a peer has of the same compile, or of the job; and those of them of which it is
    unknown whether they lowered the graph at all.

    The compile that lacks it, of the program that its peer traced, is damaged; of a different program it differs in
    what was traced, too.
    """
    found = _without(logs, lambda log: log.executions) | _without(logs, lambda log: log.torch_version)
    unknown = set[int]()
    for turn in list(_turns(logs)):
        traced = turn.where(lambda compile_: "dynamo_output_graph" in compile_.names)
        lacking = _lacking(traced)
        for rank in _of_same_program(lacking, traced):
            logs[rank].lost(lacking[rank], "it lacks a record that other ranks have")
        found.update(lacking)
        unknown.update(lacking.where(_may_be_of_other_backend))
    return found, unknown


def _without(logs: ByRank[RankLog], has: Callable[[RankLog], object]) -> set[int]:
    """Ranks without what any other rank has."""
    having = logs.where(has)
    return set(logs).difference(having) if having else set()


def _turns(logs: ByRank[RankLog]) -> Iterator[ByRank[LoggedCompile]]:
    """The first, second, ... compile of every frame on the ranks that made it and logged its end."""
    by_turn: dict[tuple[Frame, int], dict[int, LoggedCompile]] = {}
    for rank, log in logs.items():
        by_frame = log.by_frame.items()
        for frame, compiles in by_frame:
            for number, compile_ in enumerate(compiles):
                turn = by_turn.setdefault((frame, number), {})
                turn[rank] = compile_
    for made in by_turn.values():
        turn_of_all = ByRank(made)
        yield turn_of_all.where(lambda compile_: compile_.is_ended)


def _lacking(turn: ByRank[LoggedCompile]) -> ByRank[LoggedCompile]:
    """Ranks that lack records of their compile which one peer has besides all those that they have."""
    if not turn.differ(lambda compile_: compile_.lowered):
        return ByRank({})
    lowered = [Counter(compile_.lowered) for compile_ in turn.values()]
    return turn.where(lambda compile_: any(_has_lost(compile_, peer) for peer in lowered))


def _of_same_program(lacking: ByRank[LoggedCompile], turn: ByRank[LoggedCompile]) -> list[int]:
    """Ranks that traced what a rank traced that lacks nothing."""
    programs = {compile_.program for compile_ in turn.without(lacking).values()}
    return [rank for rank, compile_ in lacking.items() if compile_.program in programs and not compile_.fail_type]


def _has_lost(compile_: LoggedCompile, peer: Counter[str]) -> bool:
    """True when neither a cache, nor its backend, nor a different program is the reason for what a peer has more."""
    own = Counter(compile_.lowered)
    if not own < peer:
        return False
    is_loaded = any(name.endswith("_hit") for name in compile_.names)
    if is_loaded:
        return False
    is_other_backend = CODE in peer.keys() - own.keys()
    if is_other_backend:
        return not compile_.says_how_lowered
    return True


def _may_be_of_other_backend(compile_: LoggedCompile) -> bool:
    """True where neither the metrics nor any lowered graph says how far a compile was lowered."""
    return not (compile_.lowered and compile_.says_how_lowered)
