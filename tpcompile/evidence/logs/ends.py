"""Logs of a job -> what each lacks, and how each ends: the evidence about a job that did not end well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tpcompile.evidence.logs.ranklog import LoggedCompile, RankLog


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
        return f"the log of rank {self.rank} {lacks}{self._last_compile()}"

    def _last_compile(self) -> str:
        if self.last is None:
            return ""
        state = "ended" if self.last.is_ended else "not ended"
        failed = f", failed with {self.last.failure[0]}" if self.last.failure else ""
        at = f" ({self.last.line})" if self.last.line else ""
        what = f"compile {self.last.compile_id} of {self.last.function or '?'}{at}"
        return f"; its last compile is {what}, {state}{failed}; its last record is of {self.ended}"


def log_ends(logs: Iterable[RankLog], missing: Sequence[int]) -> list[LogEnd]:
    """How every rank's log ends, by rank."""
    ends = [_end(log) for log in logs]
    ends += [LogEnd(rank, (Lack.NO_LOG,)) for rank in missing]
    return sorted(ends, key=lambda end: end.rank)


def _end(log: RankLog) -> LogEnd:
    unfinished = [compile_ for compile_ in log.compiles if not compile_.is_ended]
    last = unfinished[-1] if unfinished else None
    if last is None and log.compiles:
        last = log.compiles[-1]
    return LogEnd(log.rank, tuple(_lacks(log, is_unfinished=bool(unfinished))), log.facts.ended, last)


def _lacks(log: RankLog, *, is_unfinished: bool) -> Iterable[Lack]:
    if not log.facts.num_records:
        yield Lack.EMPTY
        return
    if log.facts.is_cut:
        yield Lack.CUT
    if log.facts.num_damaged:
        yield Lack.DAMAGED
    if not log.compiles:
        yield Lack.NO_COMPILE
    if is_unfinished:
        yield Lack.UNFINISHED


def failed_everywhere(logs: Sequence[RankLog]) -> list[LoggedCompile]:
    """Compiles of the first rank that failed, and failed on every other rank that made them, the limit apart."""
    found = []
    for number, compile_ in enumerate(logs[0].compiles):
        if compile_.failure is None or not is_fatal(compile_.failure[0]):
            continue
        peers = [log.compiles[number] for log in logs if number < len(log.compiles)]
        if all(peer.failure and peer.failure[0] == compile_.failure[0] for peer in peers):
            found.append(compile_)
    return found


def failed_first(logs: Sequence[RankLog]) -> tuple[int, LoggedCompile] | None:
    """The compile that ended a job: it failed on one rank, and all others were ended before theirs of that number."""
    for log in logs:
        for number, compile_ in enumerate(log.compiles):
            is_error = compile_.failure is not None and is_fatal(compile_.failure[0])
            peers = [other for other in logs if other is not log]
            if is_error and all(_is_open(other, number) for other in peers):
                return log.rank, compile_
    return None


def _is_open(log: RankLog, number: int) -> bool:
    """True when the log ends inside of its compile of that number."""
    return number < len(log.compiles) and not log.compiles[number].is_ended


_FATAL = (
    "BackendCompilerFailed",
    "InternalTorchDynamoError",
    "InductorError",
    "LoweringException",
    "TorchRuntimeError",
)


def is_fatal(fail_type: str) -> bool:
    """True for an error that ends the program unless it suppresses errors; a frame that is skipped is none."""
    return any(name in fail_type for name in _FATAL)
