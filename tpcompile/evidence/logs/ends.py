"""Logs of a job -> what each lacks, and how each ends: the evidence about a job that did not end well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tpcompile.evidence.logs.ranklog import LoggedCompile, RankLog
from tpcompile.evidence.several import grouped
from tpcompile.evidence.text.ranks import ranks_text


class Lack(Enum):
    """Why a log is not all there is to know about its rank."""

    NO_LOG = "left no log: it never compiled anything, or its log is lost"
    EMPTY = "is empty"
    CUT = "ends inside a record"
    DAMAGED = "has records that cannot be read"
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

    def __str__(self) -> str:
        if Lack.NO_LOG in self.lacks:
            return f"rank {self.rank} {Lack.NO_LOG.value}"
        lacks = " and ".join(lack.value for lack in self.lacks) or "is whole"
        last = f"; its {self.last_compile}; its last record is of {self.ended}" if self.last else ""
        return f"the log of rank {self.rank} {lacks}{last}"

    @property
    def last_compile(self) -> str:
        """The last thing it compiled, in few words."""
        if self.last is None:
            return "no compile"
        function, path, number = self.last.frame
        frame = f"{function} {path}:{number}" if path else function or "?"
        state = "ended" if self.last.is_ended else "not ended"
        failed = f", failed with {self.last.fail_type}" if self.last.fail_type else ""
        return f"last compile is {self.last.compile_id} of {frame}, {state}{failed}"


def log_ends(logs: Iterable[RankLog], missing: Sequence[int]) -> list[LogEnd]:
    """How every rank's log ends, by rank."""
    ends = [_end(log) for log in logs]
    ends += [LogEnd(rank, (Lack.NO_LOG,)) for rank in missing]
    return sorted(ends, key=lambda end: end.rank)


def endings(ends: Sequence[LogEnd]) -> str:
    """The last compile of every rank, ranks that end alike together."""
    alike = grouped(ends, lambda end: end.last_compile)
    texts = [f"rank {ranks_text([end.rank for end in same])}: {last}" for last, same in alike.items()]
    return "; ".join(texts)


def _end(log: RankLog) -> LogEnd:
    unfinished = [compile_ for compile_ in log.compiles if not compile_.is_ended]
    shown = (unfinished or log.compiles)[-1:]
    lacks = _lacks(log, is_unfinished=bool(unfinished))
    return LogEnd(log.rank, lacks, log.facts.ended, shown[0] if shown else None)


def _lacks(log: RankLog, *, is_unfinished: bool) -> tuple[Lack, ...]:
    if not log.facts.num_records:
        return (Lack.EMPTY,)
    observed = {
        Lack.CUT: log.facts.is_cut,
        Lack.DAMAGED: log.facts.num_damaged > 0,
        Lack.NO_COMPILE: not log.compiles,
        Lack.UNFINISHED: is_unfinished,
    }
    return tuple(lack for lack, is_so in observed.items() if is_so)


def failed_everywhere(logs: Sequence[RankLog]) -> list[LoggedCompile]:
    """Compiles of the first rank that failed, and failed on every other rank that made them, the limit apart."""
    found = []
    for number, compile_ in enumerate(logs[0].compiles):
        kinds = {peer.fail_type for peer in _turn(logs, number)}
        if compile_.fatal and kinds == {compile_.fatal}:
            found.append(compile_)
    return found


def failed_first(logs: Sequence[RankLog]) -> tuple[int, LoggedCompile] | None:
    """The compile that ended a job: it failed on one rank, and all other logs end inside theirs of that number."""
    for log in logs:
        fatal = [(number, compile_) for number, compile_ in enumerate(log.compiles) if compile_.fatal]
        for number, compile_ in fatal:
            still_open = [peer for peer in _turn(logs, number) if not peer.is_ended]
            if len(still_open) == len(logs) - 1:
                return log.rank, compile_
    return None


def _turn(logs: Sequence[RankLog], number: int) -> list[LoggedCompile]:
    """The compiles of that number, of the ranks that got so far."""
    return [log.compiles[number] for log in logs if number < len(log.compiles)]
