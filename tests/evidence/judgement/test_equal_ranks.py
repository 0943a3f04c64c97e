"""Which ranks the line `no record` names: those that were to be compared, and no others."""

from __future__ import annotations

import pytest

from tpcompile.errors import ExitCode
from tpcompile.evidence.judgement.equal_ranks import equal_ranks
from tpcompile.evidence.records import Check, CheckId, Status, Verdict


def lines(domains: dict[str, tuple[tuple[int, ...], ...]], *, missing: tuple[int, ...] = ()) -> list[str]:
    check = Check(id=CheckId.REPORTED, status=Status.FAIL, expected="", observed="", ranks=missing)
    verdict = Verdict(
        status=Status.PASS, exit_code=ExitCode.PASS, world_size=8, summary="", domains=domains,
        checks=(check,) if missing else (),
    )  # fmt: skip
    return [text for text, _ in equal_ranks(verdict)]


@pytest.mark.parametrize("traced", [{"tp 0-3": ((0, 1, 2, 3),)}, {"tp 4-7": ((4, 5), (6, 7))}])
def test_ranks_of_domains_that_are_not_compared_are_not_missing(traced: dict[str, tuple[tuple[int, ...], ...]]) -> None:
    """A dry run that traces some of them; the sentinel of one domain."""
    assert not any("no record" in line for line in lines(traced))


@pytest.mark.parametrize(
    ("domains", "reported", "named"),
    [
        ({"tp 0-3": ((0, 1, 2),)}, (3,), "no record: rank 3"),
        ({"tp 0-6 step 2": ((0, 2),)}, (), "no record: ranks 4,6"),
        ({"tp 0-3": ((0, 1, 2, 3),)}, (4, 5, 6, 7), "no record: ranks 4-7"),  # of a whole node
        ({"world": ((0, 1),)}, (), "no record: ranks 2-7"),
    ],
)
def test_ranks_that_were_to_be_compared_are(
    domains: dict[str, tuple[tuple[int, ...], ...]], reported: tuple[int, ...], named: str
) -> None:
    assert lines(domains, missing=reported)[-1] == named
