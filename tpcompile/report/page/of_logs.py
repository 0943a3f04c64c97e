"""TORCH_TRACE files of a job -> evidence for a page: what was compiled, when, and by which rank."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from tpcompile.evidence.logs.diagnose import Examined
from tpcompile.evidence.logs.ranklog import RankLog
from tpcompile.evidence.records import RankDigest
from tpcompile.report.page.evidence import Event, Evidence, kind_of


def evidence_of_logs(examined: Examined, *, name: str) -> Evidence:
    """All that the logs of a job hold; times of its events are Unix times."""
    digests = examined.digest.digests()
    by_rank = {digest.rank: digest for digest in digests}
    logs = examined.job.logs
    events = {rank: list(_events(log, by_rank.get(rank))) for rank, log in logs.items()}
    facts = {"torch": examined.digest.torch_version} if examined.digest.torch_version else {}
    left = examined.digest.selection.num_left
    notes = (f"{left} functions differ in their text and were not compared",) if left else ()
    return Evidence(
        verdict=examined.verdict, command="diagnose", name=name, digests=digests, fetch=examined.digest.fetch,
        events=events, has_clock=True, facts=facts, notes=notes,
    )  # fmt: skip


def _events(log: RankLog, digest: RankDigest | None) -> Iterator[Event]:
    parsed = {} if digest is None else {compile_.index: compile_ for compile_ in digest.compiles}
    year = datetime.fromtimestamp(log.path.stat().st_mtime).year
    for number, compile_ in enumerate(log.compiles):
        start, end = _seconds(compile_.began, year), _seconds(compile_.ended, year)
        if start is None or end is None:
            continue
        found = parsed.get(number)
        why = "; ".join(found.recompile_reasons[:1]) if found else ""
        kind = kind_of(found) if found else "compile" if compile_.compile_id.endswith("/0") else "recompile"
        label = f"{compile_.compile_id} {compile_.frame}"
        yield Event(kind, label, start, max(start, end), compile_.failed if compile_.fail_type else why, compile_.line)


def _seconds(time: bytes, year: int) -> float | None:
    """`1128 11:10:25.976000` of a year, which torch does not log -> Unix time; None for any other text."""
    try:
        return datetime.strptime(f"{year}{time.decode()}", "%Y%m%d %H:%M:%S.%f").timestamp()
    except ValueError:
        return None
