"""Digests and divergences of a run + its configuration -> `Verdict`; also offline, from a run directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tpcompile.choices import TARGET
from tpcompile.errors import ExitCode
from tpcompile.evidence.comparison.compare import Allowed, Fetch, compare
from tpcompile.evidence.compiles.normalised import hidden_check
from tpcompile.evidence.digests.digest import environment_items, layer_items
from tpcompile.evidence.digests.recompiles import recompile_causes
from tpcompile.evidence.groups.domain import by_domain
from tpcompile.evidence.iterables import find, first, grouped, indexed
from tpcompile.evidence.judgement import checks
from tpcompile.evidence.judgement import leading as lead
from tpcompile.evidence.judgement.equal_ranks import equal_groups
from tpcompile.evidence.judgement.mesh_places import coordinates_of, with_places
from tpcompile.evidence.judgement.rank_taint import find_taints, taint_check
from tpcompile.evidence.records import (
    Check,
    CheckId,
    Divergence,
    DivergenceClass,
    Item,
    Layer,
    Lead,
    RankDigest,
    RankRecord,
    Status,
    Taint,
    Verdict,
)
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.findings import ranks_of
from tpcompile.evidence.text.ranks import named_ranks


@dataclass(frozen=True)
class Absent:
    """A rank that left no digest, and its last known activity."""

    rank: int
    last_seen: str
    host: str = ""


@dataclass(frozen=True)
class Rules:
    """What a run must satisfy."""

    judge: Callable[[Sequence[RankDigest], Sequence[Divergence]], list[Check]]
    """Digests and divergences -> checks."""
    timeout_s: float
    """Seconds the ranks had to report; named in the check of a missing rank."""
    allowed: Allowed = ()
    """Intended differences."""
    preset: str = ""
    modes: tuple[str, ...] = ()
    taint: Literal["off", "list", "fail"] = "off"
    """How rank-dependent guards and constants under equal graphs are treated."""
    taint_modes: tuple[str, ...] = ("",)
    """Modes whose taints are judged."""
    expected_recompiles: tuple[str, ...] = ()
    """Phases that change a guarded value on purpose."""
    timings: Callable[[Sequence[RankDigest]], dict[str, float]] = lambda _digests: {}
    """Median ms per call, by mode."""
    is_running: bool = False
    """The program continues after the comparison."""
    needs_peers: bool = False
    """A run in which no rank has another one to be compared with is incomplete, not green."""
    revise: Callable[[tuple[Divergence, ...]], tuple[Divergence, ...]] = tuple
    """Correction by the source of the digests, from what the digests do not hold: adds or removes divergences."""


SENTINEL = "sentinel"
"""`kind` in the `run.json` of a run that a sentinel ended."""


CAPTURED = "captured"
"""`kind` in the `run.json` of a verdict that `tpcompile.check` published."""


DRYRUN = "dryrun"
"""`kind` in the `run.json` of a job that was not started: some of its ranks have records."""


def capture_rules(*, timeout_s: float, allowed: Allowed = (), num_breaks: int | None = 0, alone: bool = False) -> Rules:
    """Rules for any program: something was compiled, no other graph breaks than expected, the ranks agree, no
    undeclared custom op. A job of one rank is incomplete unless it is meant to be `alone`."""
    judge = partial(checks.captured, num_breaks=num_breaks)
    return Rules(judge, timeout_s, allowed, preset="captured program", taint="list", needs_peers=not alone)


def agree_rules(*, timeout_s: float, allowed: Allowed = ()) -> Rules:
    """Rules for a program in mid-run: the ranks compiled the same programs."""
    return Rules(checks.agreed, timeout_s, allowed, preset="running program", is_running=True)


def conclude(
    rules: Rules,
    digests: Sequence[RankDigest],
    fetch: Fetch,
    *,
    world_size: int,
    absent: Sequence[Absent] = (),
    problems: Sequence[Check] = (),
    reported: Sequence[Check] = (),
) -> Verdict:
    """Judge a run. `absent` are ranks that left no digest, `problems` are checks that failed before the comparison.

    `reported` are the checks of a verdict before this one on absent ranks, which knew more of them.
    """
    found_by_layer = compare(digests, fetch, allowed=rules.allowed, is_running=rules.is_running)
    divergences = rules.revise(_without_raised(found_by_layer, problems))
    judged = rules.judge(digests, divergences)
    taints: tuple[Taint, ...] = ()
    seen = grouped(absent, lambda one: one.last_seen)
    found = [
        *reported,
        *(_absent_check(rules, [one.rank for one in alike], problems, last_seen=at) for at, alike in seen.items()),
        *(check.changed(is_consequence=_is_consequence(check, divergences)) for check in problems),
    ]
    found += checks.ended_early(judged) if problems else judged
    if rules.taint != "off":
        taints = find_taints(digests, fetch, allowed=rules.allowed)
        found += [taint_check(mode, digests, taints, fails=rules.taint == "fail") for mode in rules.taint_modes]
    found += hidden_check((*rules.taint_modes, *rules.modes, "")[0], digests)
    recompiles = recompile_causes(digests, expected_phases=rules.expected_recompiles)
    leading = lead.of_run(found, divergences, causes=checks.CAUSES, recompiles=recompiles)
    hosts = _hosts([*digests, *absent])
    leading = leading and leading.changed(hosts=hosts)
    found = [_following(check, leading) for check in found]
    exit_code = _exit_code(found, is_red=leading is not None)
    domains = {name: [digest.rank for digest in ranks] for name, ranks in by_domain(digests).items()}
    is_alone = rules.needs_peers and exit_code == ExitCode.PASS and all(len(ranks) == 1 for ranks in domains.values())
    status = Status.PASS if exit_code == ExitCode.PASS else Status.FAIL
    summary = lead.summary(leading) if leading else _passed(rules, digests, found)
    undecided = first(check for check in found if check.is_undecided) if exit_code == ExitCode.PASS else None
    if is_alone or undecided is not None:
        status, exit_code = Status.SKIPPED, ExitCode.INCOMPLETE
        summary = _alone(world_size) if undecided is None else f"{undecided.name}: {undecided.observed}"
    verdict = Verdict(
        status=status,
        exit_code=exit_code,
        world_size=world_size,
        preset=rules.preset,
        modes=rules.modes,
        summary=summary,
        lead=leading,
        checks=tuple(found),
        divergences=divergences,
        taints=taints,
        recompiles=recompiles,
        timings_ms=rules.timings(digests),
        domains=equal_groups(domains, divergences),
        hosts=hosts,
    )
    return with_places(verdict, coordinates_of(digests))


def _hosts(ranks: Sequence[RankDigest | Absent]) -> dict[str, tuple[int, ...]]:
    """Host -> its ranks; empty where all ranks of which it is known are on one."""
    known = sorted((one for one in ranks if one.host), key=lambda one: one.rank)
    by_host = {host: tuple(one.rank for one in alike) for host, alike in grouped(known, lambda one: one.host).items()}
    return by_host if len(by_host) > 1 else {}


_RAISED = (CheckId.NO_ERROR, CheckId.MACHINE)


def _without_raised(divergences: Sequence[Divergence], problems: Sequence[Check]) -> tuple[Divergence, ...]:
    """The divergences without failed compiles whose exception is among the problems already."""
    raised: set[int] = set()
    for check in problems:
        if check.id in _RAISED:
            raised.update(check.ranks)
    left: list[Divergence] = []
    for found in divergences:
        failed_on = ranks_of(found.groups[1:])  # the odd sides
        is_raised = found.cause == Cause.COMPILE_FAILED and raised.issuperset(failed_on)
        if not is_raised:
            left.append(found)
    return tuple(left)


_FOLLOWS = {Cause.GRAPH_BREAK: (CheckId.GRAPHS, CheckId.ONE_REGION, CheckId.ENTERED)}
"""Cause of a run -> the checks that fail with it: a frame that breaks has more graphs, and is entered more often."""


def _following(check: Check, leading: Lead | None) -> Check:
    follows = leading is not None and check.is_red and check.id in _FOLLOWS.get(leading.cause, ())
    return check.changed(is_consequence=True) if follows else check


_WAITS = (CheckId.TIMED_OUT, CheckId.ARRIVED, CheckId.MOVING)
_NEVER_COMPILED = (Cause.GRAPH_BREAK, Cause.ENVIRONMENT)
"""Causes that explain why a rank did not compile the collectives of the other ranks."""


def _is_consequence(problem: Check, divergences: Sequence[Divergence]) -> bool:
    """True where a red difference explains what ended the run.

    Among the same ranks: what differs in one symmetry domain explains nothing in a different one.
    """
    if problem.is_consequence:
        return True
    ranks = set(problem.ranks)
    found = [one for one in divergences if one.is_red and ranks <= set(one.ranks)]
    if problem.id == CheckId.AGREED:
        return _agreed_follows(problem.cause, {one.cause for one in found})
    if problem.id in _WAITS or problem.cause == Cause.COMMUNICATION:
        # All ranks compiled a collective, and not the same: it fails, or the ranks wait in it. A compile that some
        # ranks do not have may itself follow from a wait.
        hanging = [one for one in found if one.cls == DivergenceClass.COLLECTIVES]
        return any(all(group.item for group in one.groups) for one in hanging)
    if problem.cause == Cause.COMPILE_FAILED:
        others = [one for one in found if one.cause != Cause.COMPILE_FAILED]
        # The program that failed to compile is one that the other ranks do not have.
        return any(ranks <= set(ranks_of(one.groups[1:])) for one in others)
    return False


def _agreed_follows(cause: Cause, found: set[Cause]) -> bool:
    """True where what was found explains collectives that differ by that cause; UNKNOWN where a rank issued none."""
    if cause == Cause.UNKNOWN:
        return not found.isdisjoint(_NEVER_COMPILED)
    is_found_itself = cause in found and Cause.GRAPH_BREAK not in found
    return bool(found) and not is_found_itself


def _alone(world_size: int) -> str:
    """What a run says in which no rank had another one to be compared with."""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks, each alone in its group"
    return (
        f"{ranks}: nothing was compared; run the program on 2 ranks or more, e.g. torchrun --nproc-per-node 2 "
        "train.py, or pass alone=True to capture"
    )


def fetch_from(records: Sequence[RankRecord]) -> Fetch:
    """A `Fetch` that reads the items from the records themselves."""
    return fetch_of(indexed(records, lambda record: record.rank))


def fetch_of(by_rank: Mapping[int, RankRecord]) -> Fetch:
    """The same of records by rank, where several ranks may share one."""

    def fetch(rank: int, index: int, layer: Layer, part: str) -> Sequence[Item]:
        record = by_rank[rank]
        return environment_items(record) if index < 0 else layer_items(record.compiles[index], layer, part)

    return fetch


def _absent_check(rules: Rules, ranks: Sequence[int], problems: Sequence[Check], *, last_seen: str) -> Check:
    """Ranks that were seen last at the same place; a consequence where a problem says why ranks do not progress."""
    explaining = [check for check in problems if check.id in (CheckId.ALIVE, CheckId.MOVING)]
    verb = "is" if len(ranks) == 1 else "are"
    return Check(
        id=CheckId.REPORTED,
        mode=rules.modes[-1] if rules.modes else "",
        status=Status.FAIL,
        expected=f"a digest within {rules.timeout_s:g} s",
        observed=f"{named_ranks(ranks)} {verb} missing; last seen {last_seen}",
        ranks=tuple(ranks),
        is_consequence=any(check.cause != Cause.UNKNOWN for check in explaining),
    )


def _exit_code(found: Sequence[Check], *, is_red: bool) -> ExitCode:
    """The exit code of a run; `is_red` is true where any check failed or any divergence is red."""
    if not is_red:
        return ExitCode.PASS
    failed = {check.id for check in found if check.is_red}
    # Where the machine refused it, or nothing was compiled, the outcome of every other check is meaningless.
    own_codes = {
        CheckId.MACHINE: ExitCode.ENVIRONMENT,
        CheckId.TIMED_OUT: ExitCode.TIMEOUT,
        CheckId.COMPILED: ExitCode.NOTHING_COMPILED,
    }
    decisive = find(own_codes, lambda check_id: check_id in failed)
    return own_codes[decisive] if decisive else ExitCode.FAIL


def _numbers(found: Sequence[Check]) -> str:
    """A note that the numbers had no reference, or eager alone; empty where there was one.

    A green check of the compiler has found that compiled code draws its own random numbers, and is right with others.
    """
    judged = {check.id for check in found if check.status in (Status.PASS, Status.FAIL)}
    if judged & {CheckId.FORWARD, CheckId.GRADIENTS}:
        return ""
    if any(check.id == CheckId.COMPILER for check in found):
        return "; numbers: right with the random numbers of eager"
    return "; numbers: compared with eager alone" if CheckId.EAGER in judged else "; numbers: not compared"


def _passed(rules: Rules, digests: Sequence[RankDigest], found: Sequence[Check]) -> str:
    modes = "+".join(rules.modes)
    where = f" in mode {modes}" if modes and modes != TARGET else ""
    passed = f"{lead.num_passed(found)} checks passed{_numbers(found)}"
    if len(digests) == 1:
        return f"1 rank passes{where}; {passed}; nothing between ranks was compared"
    return f"{len(digests)} ranks agree{where}; {passed}"
