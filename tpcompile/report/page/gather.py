"""A run directory, or a folder of TORCH_TRACE files -> evidence for a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tpcompile.errors import TpCompileError
from tpcompile.evidence.groups.domain import Fetch
from tpcompile.evidence.logs.diagnose import examined
from tpcompile.evidence.records import Item, Layer, Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.report.page.evidence import Evidence, together
from tpcompile.report.page.of_logs import evidence_of_logs
from tpcompile.report.page.of_run import evidence_of_run, timed_events

_TRACE = "trace"
"""Folder of torch's logs in a run directory of `tpcompile run`."""


@contextmanager
def gathered(path: Path, judge: Callable[[RunDir], Verdict]) -> Iterator[Evidence]:
    """All that is known of a run; inside the block its logs can be read.

    `judge` judges a run directory that holds records and no verdict. Raises ConfigError where there is no run.
    """
    run_dir = RunDir.open(path)
    verdict = run_dir.read_verdict()
    logs = run_dir.path / _TRACE
    if verdict is None and run_dir.rank_files("record.json"):
        verdict = judge(run_dir)
    if logs.is_dir():
        with _watched(run_dir, logs, verdict) as evidence:
            yield evidence
    elif verdict is not None:
        yield evidence_of_run(run_dir, verdict)
    else:
        with examined([path]) as found:
            yield replace(evidence_of_logs(found, name=str(path)), logs=path)


@contextmanager
def _watched(run_dir: RunDir, logs: Path, verdict: Verdict | None) -> Iterator[Evidence]:
    """A run of `tpcompile run`: what torch logged, and what the sentinel saw."""
    known = None if verdict is None else replace(evidence_of_run(run_dir, verdict), command="run")
    with ExitStack() as stack:
        try:
            found = stack.enter_context(examined([logs]))
        except TpCompileError as error:  # nothing was compiled, or the logs cannot be read
            if known is None:
                raise
            yield replace(known, notes=(*known.notes, f"torch's logs: {error}"))
            return
        compiled = evidence_of_logs(found, name=run_dir.path.name)
        if known is not None:
            compiled = replace(compiled, fetch=_with_environment(compiled, known))
        yield replace(
            compiled,
            command="run",
            logs=logs,
            verdict=verdict or compiled.verdict,
            events=together(compiled, timed_events(run_dir)),
            facts={**compiled.facts, **(known.facts if known else {})},
        )


def _with_environment(compiled: Evidence, known: Evidence) -> Fetch:
    """Items of the logs; the environment, which torch does not log, from a record of the sentinel if there is one."""
    recorded = {digest.rank for digest in known.digests}

    def fetch(rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
        is_known = index < 0 and rank in recorded
        return (known if is_known else compiled).fetch(rank, index, layer, part)

    return fetch
