"""Logs of a job -> what each log lacks, and how it ends: the evidence about a job that crashed or hung."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tpcompile.evidence.compiles.contradictions import CODE
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import last
from tpcompile.evidence.logs.compiled import Frame, LoggedCompile
from tpcompile.evidence.logs.domains import Domain
from tpcompile.evidence.logs.ranklog import RankLog
from tpcompile.evidence.text.ranks import named_ranks


class Lack(Enum):
    """Why a log does not hold everything about its rank."""

    NO_LOG = "left no log: it never compiled anything, or its log is lost"
    EMPTY = "is empty"
    TWO_RUNS = "holds the records of two runs (give the logs of one run only)"
    CUT = "ends inside a record"
    DAMAGED = "has records that cannot be read"
    BROKEN = "has records that contradict each other"
    GAPS = "lacks compiles that torch numbered"
    FEWER = "lacks records that other ranks have"
    UNLOWERED = "does not say whether its graphs were lowered like those of other ranks"
    NO_COMPILE = "ends before any compile"
    UNFINISHED = "ends inside a compile"


@dataclass(frozen=True)
class LogEnd:
    """How the log of one rank ends."""

    rank: int
    lacks: tuple[Lack, ...] = ()
    ended: str = ""
    """Time of the last record, `MMDD hh:mm:ss.ffffff`."""
    last: LoggedCompile | None = None
    damaged: LoggedCompile | None = None
    """The first compile that cannot be relied on."""

    @property
    def is_partial(self) -> bool:
        """True when a compile, or what is missing of it, may not have been observed; a peer's record shows one part."""
        return self.damaged is not None or any(lack != Lack.FEWER for lack in self.lacks)

    def __str__(self) -> str:
        if Lack.NO_LOG in self.lacks:
            return f"rank {self.rank} {Lack.NO_LOG.value}"
        lacking = [lack.value for lack in self.lacks]
        lacks = " and ".join(lacking) or "is whole"
        ends = f"the log of rank {self.rank} {lacks}"
        if self.damaged is not None:
            ends += f" (compile {self.damaged.compile_id}: {self.damaged.damage})"
        if self.last is None:
            return ends
        return f"{ends}; its {self.last_compile}; its last record is of {self.ended}"

    @property
    def last_compile(self) -> str:
        """The last compile of the log, and whether it ended or failed."""
        if self.last is None:
            return "no compile"
        state = "ended" if self.last.is_ended else "not ended"
        if self.last.fail_type:
            state += f", failed with {self.last.fail_type}"
        return f"last compile is {self.last.compile_id} of {self.last.frame}, {state}"


def log_ends(logs: ByRank[RankLog], missing: Sequence[int], domains: Iterable[Domain]) -> ByRank[LogEnd]:
    """How the log of every rank ends; ranks in `missing` left no log, those of a domain must agree."""
    lost = {rank: LogEnd(rank, (Lack.NO_LOG,)) for rank in missing}
    own = logs.map(_lacks)  # before the logs of other ranks add to what is damaged
    fewer, unlowered = set[int](), set[int]()
    for domain in domains:
        found, unknown = fewer_records(logs.among(logs.keys() & set(domain.ranks)))
        fewer |= found
        unlowered |= unknown
    # torch may number a frame and log nothing of it: then it is missing on all ranks
    everywhere = frozenset.intersection(*(log.missing for log in logs.values()))
    gaps = logs.where(lambda log: log.missing - everywhere)
    beside = {Lack.GAPS: set(gaps), Lack.FEWER: fewer, Lack.UNLOWERED: unlowered}
    return ByRank({**logs.map(lambda log: _end(log, own[log.rank], beside)), **lost})


def described(ends: ByRank[LogEnd]) -> list[str]:
    """One line for each rank, and one for all that left no log: a job may have lost thousands."""
    lost = ends.where(lambda end: Lack.NO_LOG in end.lacks)
    lines = [str(end) for end in ends.without(lost).values()]
    if len(lost) > 1:
        who = named_ranks(lost.ranks)
        lines.append(f"{who} left no log: they never compiled anything, or their logs are lost")
    else:
        lines += map(str, lost.values())
    return lines


def _end(log: RankLog, own: Sequence[Lack], beside: Mapping[Lack, Collection[int]]) -> LogEnd:
    """`own`: what the log shows that it lacks; `beside`: ranks that lack something, as the logs of others show."""
    unfinished = [compile_ for compile_ in log.compiles if not compile_.is_ended]
    shown = last(unfinished or log.compiles)
    lacks = [*own, *(lack for lack, ranks in beside.items() if log.rank in ranks)]
    return LogEnd(log.rank, tuple(lacks), log.facts.time.decode(), shown, log.damaged)


def _lacks(log: RankLog) -> tuple[Lack, ...]:
    if not log.facts.num_records:
        return (Lack.EMPTY,)
    observed = {
        Lack.CUT: log.facts.is_cut,
        Lack.DAMAGED: log.facts.num_damaged > 0,
        Lack.TWO_RUNS: log.is_of_two_runs,
        Lack.BROKEN: log.damaged is not None and not (log.facts.num_damaged or log.is_of_two_runs),
        Lack.NO_COMPILE: not log.compiles,
        Lack.UNFINISHED: not all(compile_.is_ended for compile_ in log.compiles),
    }
    return tuple(lack for lack, is_so in observed.items() if is_so)


def failed_everywhere(logs: ByRank[RankLog]) -> list[LoggedCompile]:
    """Compiles of the first rank that failed with a fatal error, of the same type on every rank that made them."""
    turns = [_turn(logs, number) for number in logs.first.fatal]
    return [turn.first for turn in turns if not turn.differ(lambda compile_: compile_.fail_type)]


def failed_first(logs: ByRank[RankLog]) -> tuple[int, LoggedCompile] | None:
    """The compile that ended a job: it failed on one rank, and every other log ends inside that compile."""
    num_peers = len(logs) - 1
    for rank, log in logs.items():
        for number, compile_ in log.fatal.items():
            compiles = _turn(logs, number)
            unfinished = compiles.where(lambda peer: not (peer.is_ended or peer.damage))
            if len(unfinished) == num_peers:
                return rank, compile_
    return None


def _turn(logs: ByRank[RankLog], number: int) -> ByRank[LoggedCompile]:
    so_far = logs.where(lambda log: number < len(log.compiles))
    return so_far.map(lambda log: log.compiles[number])


# Records that a rank lacks, as those of its peers show.


def fewer_records(logs: ByRank[RankLog]) -> tuple[set[int], set[int]]:
    """Ranks that lack a record which a peer has of the same compile, or of the job; and those of them of which it is
    unknown whether they lowered the graph at all.

    A log has no count of its records. Where two ranks compiled the same frame, one with a lowered graph, generated code
    or a schedule that the other has no trace of, and which it did not load from a cache, that record was not observed.
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
