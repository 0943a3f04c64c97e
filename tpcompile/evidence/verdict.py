"""Digests and divergences of a run + its configuration -> `Verdict`; also offline, from a run directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tpcompile.config import RunConfig
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.evidence import checks
from tpcompile.evidence.compare import Allowed, Fetch, compare, equal_groups
from tpcompile.evidence.digest import digest_rank, environment_items, layer_items
from tpcompile.evidence.incidental import hidden_check
from tpcompile.evidence.ranktext import ranks_text
from tpcompile.evidence.recompiles import recompile_causes
from tpcompile.evidence.records import (
    Check,
    Divergence,
    Item,
    Layer,
    RankDigest,
    RankRecord,
    Status,
    UserLine,
    Verdict,
)
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.taint import find_taints, taint_check


@dataclass(frozen=True)
class Absent:
    """A rank without a digest, and what it was last seen doing."""

    rank: int
    last_seen: str


@dataclass(frozen=True)
class Rules:
    """What is asked of a run."""

    judge: Callable[[Sequence[RankDigest], Sequence[Divergence]], list[Check]]
    """Digests and divergences -> checks."""
    timeout_s: float
    """Seconds ranks had to report; for the text of a missing rank."""
    allowed: Allowed = ()
    """Intended differences."""
    preset: str = ""
    modes: tuple[str, ...] = ()
    taint: Literal["off", "list", "fail"] = "off"
    """What becomes of rank-dependent guards and constants under equal graphs."""
    expected_recompiles: tuple[str, ...] = ()
    """Phases that change something on purpose."""
    revise: Callable[[tuple[Divergence, ...]], tuple[Divergence, ...]] = tuple
    """What the source of the digests knows besides them: adds divergences, or says that one is none."""


def gate_rules(config: RunConfig) -> Rules:
    """The checks of the configured modes of the gate."""

    def judge(digests: Sequence[RankDigest], divergences: Sequence[Divergence]) -> list[Check]:
        return [check for mode in config.modes for check in checks.MODES[mode](config, digests, divergences)]

    allowed = [(a.layer, a.contains, a.reason) for a in config.gate.allow]
    return Rules(
        judge, config.gate.store_timeout_s, allowed, preset=config.preset, modes=config.modes, taint=config.gate.taint,
        expected_recompiles=(f"C/{checks.RESIZED}",),
    )  # fmt: skip


SENTINEL = "sentinel"
"""`kind` in the `run.json` of a run that a sentinel ended."""


def capture_rules(*, timeout_s: float, allowed: Allowed = ()) -> Rules:
    """What can be asked of any program: something was compiled, no breaks, ranks agree, no undeclared op."""
    return Rules(checks.captured, timeout_s, allowed, preset="captured program", taint="list")


def agree_rules(*, timeout_s: float, allowed: Allowed = ()) -> Rules:
    """What is asked of a program in mid-run: the ranks compiled the same."""
    return Rules(checks.agreed, timeout_s, allowed, preset="running program")


def conclude(
    rules: Rules,
    digests: Sequence[RankDigest],
    fetch: Fetch,
    *,
    world_size: int,
    absent: Sequence[Absent] = (),
    problems: Sequence[Check] = (),
) -> Verdict:
    """Judge a run. `absent` are ranks that left no digest, `problems` are checks that already failed on the way."""
    divergences = rules.revise(compare(digests, fetch, allowed=rules.allowed))
    judged = rules.judge(digests, divergences)
    taints = find_taints(digests, fetch, allowed=rules.allowed) if rules.taint != "off" else ()
    missing = [_absent_check(rules, a) for a in absent]
    tainted = [taint_check(mode, digests, taints, fails=rules.taint == "fail") for mode in _taint_modes(rules)]
    found = [*missing, *problems, *(checks.ended_early(judged) if problems else judged), *tainted]
    found += hidden_check("C" if "C" in rules.modes else (*rules.modes, "")[0], digests)
    return Verdict(
        status=Status.FAIL if _failed(found, divergences) else Status.PASS,
        exit_code=_exit_code(found, divergences),
        world_size=world_size,
        preset=rules.preset,
        modes=rules.modes,
        summary=_summary(rules, digests, found, divergences),
        checks=tuple(found),
        divergences=divergences,
        taints=taints,
        recompiles=recompile_causes(digests, expected_phases=rules.expected_recompiles),
        timings_ms=checks.timings(digests),
        domains=equal_groups(digests),
    )


def fetch_from(records: Sequence[RankRecord]) -> Fetch:
    """Details out of the records themselves."""
    by_rank = {record.rank: record for record in records}

    def fetch(rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
        record = by_rank[rank]
        return environment_items(record) if index < 0 else layer_items(record.compiles[index], layer, part)

    return fetch


def replay(run_dir: RunDir) -> Verdict:
    """Judge a finished run again, from its rank records alone. Raises ConfigError when there are none."""
    records = run_dir.read_records()
    if not records:
        raise ConfigError(f"{run_dir.path} holds no rank records; was the run stopped before anything compiled?")
    rules = _rules_of(run_dir)
    world_size = max(record.world_size for record in records)
    have = {record.rank for record in records}
    statuses = {status.rank: status for status in run_dir.read_statuses()}
    absent = [
        Absent(rank, f"in phase {statuses[rank].phase}" if rank in statuses else "never, it left no status")
        for rank in range(world_size)
        if rank not in have
    ]
    before = run_dir.read_verdict()
    problems = [c for c in before.checks if c.name in checks.LIVE_ONLY] if before else []
    digests = [digest_rank(record) for record in records]
    return conclude(rules, digests, fetch_from(records), world_size=world_size, absent=absent, problems=problems)


def _rules_of(run_dir: RunDir) -> Rules:
    """What was asked of the run: `run.json` of a sentinel says so, a run of the gate has its configuration."""
    facts = run_dir.read_run()
    if facts.get("kind") == SENTINEL:
        allowed = [(Layer(layer), contains, reason) for layer, contains, reason in facts["allowed"]]
        return agree_rules(timeout_s=facts["timeout_s"], allowed=allowed)
    return gate_rules(run_dir.read_config())


def _taint_modes(rules: Rules) -> tuple[str, ...]:
    """Mode C is the contract; A and B show what goes wrong."""
    if rules.taint == "off":
        return ()
    return tuple(mode for mode in rules.modes if mode == "C") if rules.modes else ("",)


def _absent_check(rules: Rules, absent: Absent) -> Check:
    return Check(
        name=checks.REPORTED,
        mode=rules.modes[-1] if rules.modes else "",
        status=Status.FAIL,
        expected=f"a digest within {rules.timeout_s:g} s",
        observed=f"rank {absent.rank} is missing; last seen {absent.last_seen}",
        ranks=(absent.rank,),
    )


def _failed(found: Sequence[Check], divergences: Sequence[Divergence]) -> bool:
    return any(c.status == Status.FAIL for c in found) or any(d.is_red for d in divergences)


def _exit_code(found: Sequence[Check], divergences: Sequence[Divergence]) -> ExitCode:
    if not _failed(found, divergences):
        return ExitCode.PASS
    failed = [c.name for c in found if c.status == Status.FAIL]
    if checks.TIMED_OUT in failed:
        return ExitCode.TIMEOUT
    # With nothing compiled no other check says anything, so this code wins over a plain failure.
    return ExitCode.NOTHING_COMPILED if checks.COMPILED in failed else ExitCode.FAIL


def _summary(
    rules: Rules, digests: Sequence[RankDigest], found: Sequence[Check], divergences: Sequence[Divergence]
) -> str:
    red = next((d for d in divergences if d.is_red), None)
    failed = [c for c in found if c.status == Status.FAIL]
    if not red and not failed:
        passed = sum(c.status == Status.PASS for c in found)
        ranks = "1 rank passes" if len(digests) == 1 else f"{len(digests)} ranks agree"
        where = f" in mode {'+'.join(rules.modes)}" if rules.modes else ""
        return f"{ranks}{where}; {passed} checks passed"
    # What ended the run, and a break, explain a divergence; a divergence explains every other failure.
    cause = next((c for c in failed if c.name in checks.CAUSES), None)
    if red and cause is None:
        return f"rank {' against '.join(ranks_text(g.ranks) for g in red.groups)}: {red.title}" + _at(red.line)
    first = cause or failed[0]
    who = f"rank {ranks_text(first.ranks)}: " if first.ranks else ""
    return f"{who}{first.name}: {first.observed}{_at(first.line)}"


def _at(line: UserLine | None) -> str:
    return f" ({line})" if line else ""
