"""Differences and absent ranks -> the checks of a preflight verdict, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpcompile.errors import ExitCode
from tpcompile.evidence.judgement import leading as lead
from tpcompile.evidence.records import Check, CheckId, Divergence, Status, Verdict, ranks_of
from tpcompile.evidence.records.causes import Cause
from tpcompile.preflight.facts import SHARDS

MAX_NAMED = 16
"""Differences of one group reported in full; the others are listed by name."""
MAX_LISTED = 100
"""Names listed in the details of a check."""


def reported(num_reported: int, absent: Mapping[int, str], *, timeout_s: float, silent: Sequence[int] = ()) -> Check:
    """Red when a rank is `absent` (rank -> its last published state) or `silent`: it did not send details."""
    late = [f"rank {rank} is missing; last seen {seen}" for rank, seen in sorted(absent.items())]
    late += [f"rank {rank} did not send its details" for rank in silent]
    late_ranks = sorted({*absent, *silent})
    cause = Cause.UNKNOWN
    if silent:
        cause = Cause.STOPPED_RESPONDING
    if absent:
        cause = Cause.NEVER_ARRIVED
    return Check(
        id=CheckId.REPORTED,
        status=Status.FAIL if late else Status.PASS,
        expected=f"every rank within {timeout_s:g} s",
        observed="; ".join(late) or f"all {num_reported}",
        ranks=tuple(late_ranks),
        cause=cause,
    )


def group_check(group: str, found: Sequence[Divergence], names: Sequence[str], num_keys: int) -> Check:
    """The check of one group of facts."""
    red = [divergence for divergence in found if divergence.is_red]
    equal = "consistent" if group == SHARDS else "equal"
    listed = f"{len(found)} declared" if found else f"{equal}: {num_keys}"
    details = names[:MAX_LISTED] if len(names) > MAX_NAMED else ()
    check = Check(
        name=f"{group} {equal} on all ranks",
        status=Status.PASS,
        expected=equal,
        observed=listed,
        details=tuple(details),
    )
    return check.model_copy(update=_differs(red, names)) if red else check


def _differs(red: Sequence[Divergence], names: Sequence[str]) -> dict[str, Any]:
    """Fields of the check, where some of these differ."""
    shown = red[:3]
    num_more = len(names) - len(shown)
    titles = "; ".join(divergence.title for divergence in shown)
    more = f"; {num_more} more" if len(red) > len(shown) else ""
    odd_ranks: set[int] = set()
    for divergence in red:  # ranks outside of the largest group; all ranks when two groups are equally large
        groups = divergence.groups
        has_largest = len(groups) == 1 or len(groups[0].ranks) > len(groups[1].ranks)
        odd_ranks |= set(ranks_of(groups[int(has_largest) :]))
    return {
        "status": Status.FAIL,
        "observed": titles + more,
        "ranks": tuple(sorted(odd_ranks)),
        "cause": red[0].cause,
    }


def conclude(
    checks: Sequence[Check],
    divergences: Sequence[Divergence],
    *,
    world_size: int,
    title: str,
    domains: dict[str, tuple[tuple[int, ...], ...]],
) -> Verdict:
    """Checks and divergences -> the verdict; the first red one is its summary."""
    leading = lead.of_run(checks, divergences, causes={CheckId.REPORTED})
    status, exit_code = Status.PASS, ExitCode.PASS
    summary = f"{world_size} ranks agree; {lead.num_passed(checks)} checks passed"
    if leading:
        status, exit_code = Status.FAIL, ExitCode.FAIL
        summary = lead.summary(leading)
    return Verdict(
        status=status,
        exit_code=exit_code,
        world_size=world_size,
        preset=title,
        summary=summary,
        lead=leading,
        checks=tuple(checks),
        divergences=tuple(divergences),
        domains=domains,
    )
