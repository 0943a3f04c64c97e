"""A run directory -> its verdict again, offline and without torch: of the gate, of a check, a sentinel or a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from tpcompile.config import JobConfig
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement import checks
from tpcompile.evidence.judgement.verdict import (
    CAPTURED,
    DRYRUN,
    SENTINEL,
    Absent,
    Rules,
    agree_rules,
    capture_rules,
    conclude,
    fetch_from,
)
from tpcompile.evidence.records import Check, CheckId, Divergence, Layer, RankDigest, Status, Verdict
from tpcompile.evidence.records.reader import validated
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.timeline.conclude import with_branch_of
from tpcompile.gate.checks import COMPARED, MODES, RESIZED, timings
from tpcompile.gate.measurements import GateFacts

_LOST = frozenset({CheckId.ALIVE, CheckId.REPORTED, CheckId.ARRIVED})
"""Checks that name ranks which are gone, with what was known of their processes."""


_WITHOUT_GATE = [SENTINEL, CAPTURED, DRYRUN]
"""Kinds of runs that `run.json` names, whose records have no measurements of the gate."""


class _Judged(BaseModel):
    """How a program that is not the gate's was judged, as `run.json` has it."""

    timeout_s: float
    allowed: tuple[tuple[Layer, str, str], ...]
    num_breaks: Annotated[int, Field(ge=0)] = 0
    alone: bool = False


def gate_rules(config: JobConfig) -> Rules:
    """The checks of the configured modes of the gate."""

    def judge(digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
        return [check for mode in config.modes for check in MODES[mode](config, digests, divergences)]

    allowed = [(a.layer, a.contains, a.reason) for a in config.gate.allow]
    compared = tuple(mode for mode in config.modes if mode in COMPARED)
    return Rules(
        judge, config.gate.store_timeout_s, allowed, preset=config.preset, modes=config.modes, taint=config.gate.taint,
        timings=timings, taint_modes=compared, expected_recompiles=tuple(f"{mode}/{RESIZED}" for mode in compared),
    )  # fmt: skip


def replay(run_dir: RunDir, beside: Sequence[RunDir] = ()) -> Verdict:
    """Judge a finished run again, from its rank records alone, also those in the folders of other nodes `beside`.

    Raises ConfigError when there are none, or when they are of different runs.
    """
    kind = _kind(run_dir)
    facts = None if kind in _WITHOUT_GATE else GateFacts
    records = run_dir.read_records(facts=facts, beside=beside)
    if not records:
        raise ConfigError(f"{run_dir.path} holds no rank records; was the run stopped before anything compiled?")
    world_size = max(record.world_size for record in records)
    reported = {record.rank for record in records}
    missing = set() if kind == DRYRUN else set(range(world_size)) - reported
    live = run_dir.read_verdict()
    live_checks = () if live is None else live.checks
    red = [check for check in live_checks if check.is_red]
    # The live verdict knew the processes of these ranks, which a directory does not.
    explained = {rank for check in red if check.id in _LOST for rank in check.ranks}
    host_of = {} if live is None else {rank: host for host, ranks in live.hosts.items() for rank in ranks}
    seen = {rank: f"on {host}, whose folder has its record: pass it as well" for rank, host in host_of.items()}
    statuses = [status for run in (run_dir, *beside) for status in run.read_statuses()]
    seen |= {status.rank: f"in phase {status.phase}" for status in statuses}
    absent = [
        Absent(rank, seen.get(rank, "never: it left no status"), host_of.get(rank, ""))
        for rank in sorted(missing - explained)
    ]
    digests = [digest_rank(record) for record in records]
    verdict = conclude(
        _rules_of(run_dir),
        digests,
        fetch_from(records),
        world_size=world_size,
        absent=absent,
        problems=[check for check in live_checks if check.id in checks.LIVE_ONLY],
        reported=[check for check in red if check.id == CheckId.REPORTED and missing.intersection(check.ranks)],
    )
    if live is None:
        return verdict
    is_green_dryrun = kind == DRYRUN and verdict.exit_code == ExitCode.PASS
    if is_green_dryrun and live.status != Status.FAIL:  # it knew how many ranks were traced, and why not all
        return verdict.model_copy(update={name: getattr(live, name) for name in ("status", "exit_code", "summary")})
    return with_branch_of(live, verdict)


def _kind(run_dir: RunDir) -> object:
    return run_dir.read_run().get("kind", "")


def _rules_of(run_dir: RunDir) -> Rules:
    """The rules of the run: of a sentinel or a check from `run.json`, of the gate from its configuration."""
    kind = _kind(run_dir)
    if kind not in _WITHOUT_GATE:
        return gate_rules(run_dir.read_config())
    judged = validated(_Judged, run_dir.read_run(), run_dir.path / "run.json")
    if kind == SENTINEL:
        return agree_rules(timeout_s=judged.timeout_s, allowed=judged.allowed)
    return capture_rules(
        timeout_s=judged.timeout_s, allowed=judged.allowed, num_breaks=judged.num_breaks, alone=judged.alone
    )
