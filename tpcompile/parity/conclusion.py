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
        cause=Cause.NEVER_ARRIVED if absent else Cause.STOPPED_RESPONDING if silent else Cause.UNKNOWN,
    )


def group_check(group: str, found: Sequence[Divergence], names: Sequence[str], num_keys: int) -> Check:
    """One line of the table for one group of facts."""
    red = [d for d in found if d.is_red]
    odd = sorted({r for d in red for r in odd_ranks([(g.ranks, None) for g in d.groups])})
    equal = "consistent" if group == SHARDS else "equal"
    declared = f"{len(found) - len(red)} declared" if len(found) > len(red) else ""
    observed = "; ".join(d.title for d in red[:3]) + (f"; {len(names) - 3} more" if len(red) > 3 else "")
    return Check(
        name=f"{group} {equal} on all ranks",
        mode="",
        status=Status.FAIL if red else Status.PASS,
        expected=equal,
        observed=observed or declared or f"{equal}: {num_keys}",
        details=tuple(names[:MAX_LISTED]) if len(names) > MAX_NAMED else (),
        ranks=tuple(odd),
        cause=red[0].cause if red else Cause.UNKNOWN,
    )


def conclude(
    checks: Sequence[Check],
    divergences: Sequence[Divergence],
    *,
    world_size: int,
    title: str,
    domains: dict[str, tuple[tuple[int, ...], ...]],
) -> Verdict:
    """Checks and divergences -> the verdict; the first red thing is its summary."""
    failed = [check for check in checks if check.status == Status.FAIL]
    red = [d for d in divergences if d.is_red]
    first: Lead | None = None
    if failed and (failed[0].id == CheckId.REPORTED or not red):
        first = lead.of_check(failed[0])
    elif red:
        first = lead.of_divergence(red[0])
    passed = sum(c.status == Status.PASS for c in checks)
    return Verdict(
        status=Status.FAIL if failed or red else Status.PASS,
        exit_code=ExitCode.FAIL if failed or red else ExitCode.PASS,
        world_size=world_size,
        preset=title,
        summary=lead.summary(first) if first else f"{world_size} ranks agree; {passed} checks passed",
        lead=first,
        checks=tuple(checks),
        divergences=tuple(divergences),
        domains=domains,
    )
