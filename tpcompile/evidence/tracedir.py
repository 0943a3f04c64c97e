"""Folders of TORCH_TRACE files of any job -> rank records -> verdict, offline.

What a log does not hold was not observed, and is never taken for a difference: caches omit artifacts, a killed
process ends in the middle of a record, a rank may have left no log at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpcompile.errors import ConfigError
from tpcompile.evidence import checks
from tpcompile.evidence.digest import digest_rank
from tpcompile.evidence.ranktext import ranks_text
from tpcompile.evidence.records import Check, Divergence, Layer, RankDigest, RankRecord, Status, Verdict
from tpcompile.evidence.splits import split_note
from tpcompile.evidence.trace import TraceLog, compile_records, read_trace_log
from tpcompile.evidence.verdict import Rules, conclude, fetch_from

_NAME = re.compile(r"^dedicated_log_torch_trace_rank_(?P<rank>\d+)_.*\.log$")
_PATTERN = "dedicated_log_torch_trace_rank_*.log"
NEWEST, WHOLE = "one log per rank", "logs are whole"


@dataclass(frozen=True)
class RankLog:
    """The log that speaks for one rank, and the older ones of the same rank that do not."""

    rank: int
    path: Path
    log: TraceLog
    older: tuple[Path, ...] = ()


def find_logs(folders: Sequence[Path]) -> list[RankLog]:
    """The newest log of every rank, below any of the folders. Raises ConfigError when there are less than two ranks."""
    paths: dict[int, set[Path]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"no directory at {folder}")
        for path in folder.rglob(_PATTERN):
            if match := _NAME.match(path.name):
                paths.setdefault(int(match["rank"]), set()).add(path)
    if len(paths) < 2:
        found = f"only that of rank {next(iter(paths))}" if paths else "none"
        raise ConfigError(
            f"need the trace logs of two ranks, found {found} in {', '.join(map(str, folders))}; "
            f"run the job with TORCH_TRACE=DIR on every rank, it writes DIR/{_PATTERN}"
        )
    return [_newest(rank, sorted(found)) for rank, found in sorted(paths.items())]


def _newest(rank: int, paths: Sequence[Path]) -> RankLog:
    """Files get copied, so the time inside the log counts more than that of the file."""
    logs = {path: read_trace_log(path) for path in paths}
    *older, newest = sorted(logs, key=lambda path: (logs[path].started, path.stat().st_mtime))
    return RankLog(rank, newest, logs[newest], tuple(older))


def read_ranks(logs: Sequence[RankLog], *, world_size: int) -> list[RankRecord]:
    """Records of the ranks that left a log."""
    return [
        RankRecord(
            rank=found.rank,
            world_size=world_size,
            domain="all",
            coordinate=found.rank,
            compiles=compile_records(found.log.events, roles={}, is_ended=True),
            is_cut=found.log.is_cut,
        )
        for found in logs
    ]


def diagnose(folders: Sequence[Path], *, world_size: int | None = None) -> Verdict:
    """Judge the logs of a job. `world_size` is the number of ranks it had, by default as many as the logs show."""
    logs = find_logs(folders)
    size = max(world_size or 0, logs[-1].rank + 1)
    records = read_ranks(logs, world_size=size)
    lost = sorted(set(range(size)) - {found.rank for found in logs})

    def judge(digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
        agreed = [_seen(check) for check in checks.agreed(digests, divergences)]
        return [_compiled(digests), *agreed, *split_note(digests), *_about_logs(logs, records)]

    rules = Rules(judge, 0.0, preset="trace logs")
    digests = [digest_rank(record) for record in records]
    return conclude(rules, digests, fetch_from(records), world_size=size, problems=_missing(lost, logs))


def _seen(check: Check) -> Check:
    """No log says what the environment was."""
    if check.name != f"{Layer.ENVIRONMENT} {checks.AGREE}":
        return check
    return check.model_copy(update={"status": Status.SKIPPED, "observed": "not observed"})


def _compiled(digests: Sequence[RankDigest]) -> Check:
    graphs = {d.rank: sum(c.num_items(Layer.GRAPH) > 0 for c in d.compiles) for d in digests}
    some = any(graphs.values())
    return Check(
        name=checks.COMPILED,
        mode="",
        status=Status.PASS if some else Status.FAIL,
        expected="at least 1 compile in the logs",
        observed=", ".join(f"{number} on rank {rank}" for rank, number in graphs.items()),
    )


def _about_logs(logs: Sequence[RankLog], records: Sequence[RankRecord]) -> list[Check]:
    restarted = [found for found in logs if found.older]
    cut = [r for r in records if r.is_cut or any(c.is_cut for c in r.compiles)]
    found = []
    if restarted:
        details = tuple(f"rank {r.rank}: {r.path.name}, not {', '.join(p.name for p in r.older)}" for r in restarted)
        ranks = tuple(r.rank for r in restarted)
        text = f"rank {ranks_text(ranks)} started more than once; its newest log is used"
        found.append(_information(NEWEST, text, ranks, details))
    if cut:
        details = tuple(f"rank {r.rank}: {_last(r)}" for r in cut)
        ranks = tuple(r.rank for r in cut)
        text = f"that of rank {ranks_text(ranks)} ends early; what it lacks was not observed"
        found.append(_information(WHOLE, text, ranks, details))
    return found


def _last(record: RankRecord) -> str:
    if not record.compiles:
        return "ends before any compile"
    last = record.compiles[-1]
    return f"ends {'in' if last.is_cut else 'after'} compile {last.compile_id} of {last.function or '?'}"


def _information(name: str, text: str, ranks: tuple[int, ...], details: tuple[str, ...]) -> Check:
    return Check(name=name, mode="", status=Status.INFO, expected="yes", observed=text, details=details, ranks=ranks)


def _missing(ranks: Sequence[int], logs: Sequence[RankLog]) -> list[Check]:
    if not ranks:
        return []
    have = ranks_text([found.rank for found in logs])
    return [
        Check(
            name=checks.REPORTED,
            mode="",
            status=Status.FAIL,
            expected="a trace log of every rank",
            observed=f"rank {ranks_text(ranks)} left no log; there are logs of rank {have}",
            ranks=tuple(ranks),
        )
    ]
