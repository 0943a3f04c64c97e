"""Run directories that the tests of the page share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.evidence.samples import call, compiled, counters, guard, reduce
from tests.evidence.samples import record as record_of
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import agree_rules, conclude, fetch_from
from tpcompile.evidence.records import RankRecord, Verdict
from tpcompile.evidence.rundir import RunDir

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{7*7}}"
"""A name that would run, were it not escaped."""


def rank(number: int, factor: int = 2, size: int = 2, name: str = "scale") -> RankRecord:
    """A rank whose program multiplies by a number, which it guards."""
    compile_ = compiled(
        call("mul", "%0", str(factor)),
        reduce("%1"),
        guards=(guard(source=f"L['self'].{name}", says=f"== {factor}"), guard(source="L['x']", says="is a tensor")),
    )
    environment = (("torch", "2.13.0"), ("num_threads", str(factor)))
    fields = {"world_size": size, "environment": environment, "domain": "tp", "counters": (counters(),)}
    return record_of(number, compile_, **fields)


def verdict_of(records: Sequence[RankRecord]) -> Verdict:
    """The verdict of these ranks."""
    digests = [digest_rank(record) for record in records]
    return conclude(agree_rules(timeout_s=1.0), digests, fetch_from(records), world_size=len(records))


def write_run(path: Path, records: Sequence[RankRecord]) -> RunDir:
    """A run directory with the records of these ranks and their verdict."""
    run = RunDir.create(path)
    for record in records:
        run.write_record(record)
    run.write_verdict(verdict_of(records))
    run.write_run({"kind": "sentinel", "domain": "tp", "timeout_s": 1.0, "allowed": []})
    return run


def big_run(path: Path, size: int, odd: int) -> RunDir:
    """A run of many ranks, one of which multiplies by another number; verdict and files as a real run has them."""
    few = [rank(0, size=size), rank(odd, factor=3, size=size)]
    run = RunDir.create(path)
    texts = {number: json.loads(record.to_json()) for number, record in enumerate(few)}
    for number in range(size):
        record = {**texts[number == odd], "rank": number, "coordinate": number, "facts": {"ms": number}}
        run.write_text(f"rank_{number}/record.json", json.dumps(record, sort_keys=True))
    run.write_verdict(verdict_of(run.read_records()))
    run.write_run({"kind": "sentinel", "domain": "tp", "timeout_s": 1.0, "allowed": []})
    return run
