"""Differences and absent ranks -> the checks of a parity verdict, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpcompile.errors import ExitCode
from tpcompile.evidence import lead
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import Check, CheckId, Divergence, Status, Verdict, ranks_of
from tpcompile.preflight.facts import SHARDS

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
    listed = f"{len(found)} declared" if found else f"{equal}: {num_keys}"
    check = Check(
        name=f"{group} {equal} on all ranks",
        mode="",
        status=Status.PASS,
        expected=equal,
        observed=listed,
        details=tuple(names[:MAX_LISTED]) if len(names) > MAX_NAMED else (),
    )
    if not red:
        return check
    more = f"; {len(names) - 3} more" if len(red) > 3 else ""
    failed = {
        "status": Status.FAIL,
        "observed": "; ".join(divergence.title for divergence in red[:3]) + more,
        "ranks": tuple(sorted(set[int]().union(*map(_odd_ranks, red)))),
        "cause": red[0].cause,
    }
    return check.model_copy(update=failed)


def _odd_ranks(divergence: Divergence) -> tuple[int, ...]:
    """Ranks outside of the largest group; all of them when two are the largest."""
    groups = divergence.groups
    has_largest = len(groups) == 1 or len(groups[0].ranks) > len(groups[1].ranks)
    return ranks_of(groups[int(has_largest) :])


def conclude(
    checks: Sequence[Check],
    divergences: Sequence[Divergence],
    *,
    world_size: int,
    title: str,
    domains: dict[str, tuple[tuple[int, ...], ...]],
) -> Verdict:
    """Checks and divergences -> the verdict; the first red thing is its summary."""
    told = lead.of_run(checks, divergences, causes={CheckId.REPORTED})
    status, exit_code = (Status.FAIL, ExitCode.FAIL) if told else (Status.PASS, ExitCode.PASS)
    return Verdict(
        status=status,
        exit_code=exit_code,
        world_size=world_size,
        preset=title,
        summary=lead.summary(told) if told else f"{world_size} ranks agree; {lead.num_passed(checks)} checks passed",
        lead=told,
        checks=tuple(checks),
        divergences=tuple(divergences),
        domains=domains,
    )
