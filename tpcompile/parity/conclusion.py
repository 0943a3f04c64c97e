"""Differences and absent ranks -> the checks of a parity verdict, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpcompile.errors import ExitCode
from tpcompile.evidence import lead
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import Check, CheckId, Divergence, Lead, Status, Verdict
from tpcompile.parity.differences import odd_ranks
from tpcompile.parity.facts import SHARDS

MAX_NAMED = 16
"""Differences of one group reported in full; the others are listed by name."""
MAX_LISTED = 100
"""Names listed in the details of a check."""


def reported(num_reported: int, absent: Mapping[int, str], *, timeout_s: float, silent: Sequence[int] = ()) -> Check:
    """Red when a rank is `absent` (rank -> what it was last seen doing) or was `silent` when asked for details."""
    late = [f"rank {rank} is missing; last seen {seen}" for rank, seen in sorted(absent.items())]
    late += [f"rank {rank} did not send its details" for rank in silent]
    return Check(
        id=CheckId.REPORTED,
        mode="",
        status=Status.FAIL if late else Status.PASS,
        expected=f"every rank within {timeout_s:g} s",
        observed="; ".join(late) or f"all {num_reported}",
        ranks=tuple(sorted({*absent, *silent})),
        cause=_why_late(absent, silent),
    )


def _why_late(absent: Mapping[int, str], silent: Sequence[int]) -> Cause:
    if absent:
        return Cause.NEVER_ARRIVED
    return Cause.STOPPED_RESPONDING if silent else Cause.UNKNOWN


def group_check(group: str, found: Sequence[Divergence], names: Sequence[str], num_keys: int) -> Check:
    """One line of the table for one group of facts."""
    red = [divergence for divergence in found if divergence.is_red]
    equal = "consistent" if group == SHARDS else "equal"
    status, cause, observed = Status.PASS, Cause.UNKNOWN, f"{equal}: {num_keys}"
    if found:
        observed = f"{len(found)} declared"
    if red:
        more = f"; {len(names) - 3} more" if len(red) > 3 else ""
        observed = "; ".join(divergence.title for divergence in red[:3]) + more
        status, cause = Status.FAIL, red[0].cause
    return Check(
        name=f"{group} {equal} on all ranks",
        mode="",
        status=status,
        expected=equal,
        observed=observed,
        details=tuple(names[:MAX_LISTED]) if len(names) > MAX_NAMED else (),
        ranks=tuple(sorted(set[int]().union(*map(_odd_ranks, red)))),
        cause=cause,
    )


def _odd_ranks(divergence: Divergence) -> tuple[int, ...]:
    return odd_ranks([(group.ranks, None) for group in divergence.groups])


def conclude(
    checks: Sequence[Check],
    divergences: Sequence[Divergence],
    *,
    world_size: int,
    title: str,
    domains: dict[str, tuple[tuple[int, ...], ...]],
) -> Verdict:
    """Checks and divergences -> the verdict; the first red thing is its summary."""
    first = _lead(checks, divergences)
    status, exit_code = (Status.FAIL, ExitCode.FAIL) if first else (Status.PASS, ExitCode.PASS)
    passed = sum(check.status == Status.PASS for check in checks)
    return Verdict(
        status=status,
        exit_code=exit_code,
        world_size=world_size,
        preset=title,
        summary=lead.summary(first) if first else f"{world_size} ranks agree; {passed} checks passed",
        lead=first,
        checks=tuple(checks),
        divergences=tuple(divergences),
        domains=domains,
    )


def _lead(checks: Sequence[Check], divergences: Sequence[Divergence]) -> Lead | None:
    """A rank that did not report explains a difference; a difference explains every other failed check."""
    failed = [check for check in checks if check.is_red]
    red = [divergence for divergence in divergences if divergence.is_red]
    if not failed:
        return None  # the check of its group is red with every red difference
    if failed[0].id == CheckId.REPORTED:
        return lead.of_check(failed[0])
    return lead.of_divergence(red[0]) if red else lead.of_check(failed[0])
