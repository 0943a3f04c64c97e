"""Digests and divergences of a run + its configuration -> `Verdict`; also offline, from a run directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tpcompile.errors import ExitCode
from tpcompile.evidence import checks, lead
from tpcompile.evidence.compare import Allowed, Fetch, compare, equal_groups
from tpcompile.evidence.digest import environment_items, layer_items
from tpcompile.evidence.incidental import hidden_check
from tpcompile.evidence.recompiles import recompile_causes
from tpcompile.evidence.records import (
    Check,
    CheckId,
    Divergence,
    Item,
    Layer,
    RankDigest,
    RankRecord,
    Status,
    Taint,
    Verdict,
)
from tpcompile.evidence.several import indexed
from tpcompile.evidence.taint import find_taints
from tpcompile.evidence.taintcheck import taint_check


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
    taint_modes: tuple[str, ...] = ("",)
    """Modes of which the taints are judged."""
    expected_recompiles: tuple[str, ...] = ()
    """Phases that change something on purpose."""
    timings: Callable[[Sequence[RankDigest]], dict[str, float]] = lambda _digests: {}
    """Median ms per call, by mode."""
    revise: Callable[[tuple[Divergence, ...]], tuple[Divergence, ...]] = tuple
    """What the source of the digests knows besides them: adds divergences, or says that one is none."""


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
    taints: tuple[Taint, ...] = ()
    found = [*(_absent_check(rules, rank) for rank in absent), *problems]
    found += checks.ended_early(judged) if problems else judged
    if rules.taint != "off":
        taints = find_taints(digests, fetch, allowed=rules.allowed)
        found += [taint_check(mode, digests, taints, fails=rules.taint == "fail") for mode in rules.taint_modes]
    found += hidden_check((*rules.taint_modes, *rules.modes, "")[0], digests)
    told = lead.of_run(found, divergences, causes=checks.CAUSES)
    exit_code = _exit_code(found, is_red=told is not None)
    return Verdict(
        status=Status.PASS if exit_code == ExitCode.PASS else Status.FAIL,
        exit_code=exit_code,
        world_size=world_size,
        preset=rules.preset,
        modes=rules.modes,
        summary=lead.summary(told) if told else _passed(rules, digests, found),
        lead=told,
        checks=tuple(found),
        divergences=divergences,
        taints=taints,
        recompiles=recompile_causes(digests, expected_phases=rules.expected_recompiles),
        timings_ms=rules.timings(digests),
        domains=equal_groups(digests),
    )


def fetch_from(records: Sequence[RankRecord]) -> Fetch:
    """Details out of the records themselves."""
    by_rank = indexed(records, lambda record: record.rank)

    def fetch(rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
        record = by_rank[rank]
        return environment_items(record) if index < 0 else layer_items(record.compiles[index], layer, part)

    return fetch


def _absent_check(rules: Rules, absent: Absent) -> Check:
    return Check(
        id=CheckId.REPORTED,
        mode=rules.modes[-1] if rules.modes else "",
        status=Status.FAIL,
        expected=f"a digest within {rules.timeout_s:g} s",
        observed=f"rank {absent.rank} is missing; last seen {absent.last_seen}",
        ranks=(absent.rank,),
    )


def _exit_code(found: Sequence[Check], *, is_red: bool) -> ExitCode:
    failed = {check.id for check in found if check.is_red}
    if CheckId.TIMED_OUT in failed:
        return ExitCode.TIMEOUT
    # With nothing compiled no other check says anything, so this code wins over a plain failure.
    if CheckId.COMPILED in failed:
        return ExitCode.NOTHING_COMPILED
    return ExitCode.FAIL if is_red else ExitCode.PASS


def _passed(rules: Rules, digests: Sequence[RankDigest], found: Sequence[Check]) -> str:
    ranks = "1 rank passes" if len(digests) == 1 else f"{len(digests)} ranks agree"
    where = f" in mode {'+'.join(rules.modes)}" if rules.modes else ""
    return f"{ranks}{where}; {lead.num_passed(found)} checks passed"
