"""Regions that ranks entered -> a rank that runs one of several equal modules in eager is named."""

from __future__ import annotations

import re

from tests.evidence.samples import compiled, record
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.digests.entered_regions import entered_check
from tpcompile.evidence.records import Check, CompileRecord, RankRecord, RegionCount, Status, UserLine
from tpcompile.evidence.records.causes import Cause

BLOCK = UserLine(file="/app/model.py", line=3, function="Block.forward")
METRIC = UserLine(file="/app/metric.py", line=9, function="metric")
PHASES = ("target/first", "target/steady")


def entered(times: int, target: UserLine = BLOCK, phase: str = "target/first", compile_id: str = "") -> RegionCount:
    """A callable whose calls enter one region each; `compile_id` is of a compile that one of them made."""
    ids = (f"[{compile_id}]",) if compile_id else ()
    return RegionCount(phase=phase, target=target, calls=times, entered=times, most=1, compiled=ids)


def local() -> CompileRecord:
    """A compile without collectives."""
    return compiled(phase="target/steady", compile_id="1/0", collectives=())


def rank(number: int, *regions: RegionCount, domain: str = "tp") -> RankRecord:
    """A rank that compiled a block, which has a collective, and a metric, which has none."""
    return record(number, compiled(phase="target/first"), local(), regions=regions, domain=domain)


def check(*ranks: RankRecord) -> Check:
    return entered_check("target", [digest_rank(one) for one in ranks], phases=PHASES)


def times_by_rank(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(\d+) times \D*(\d+)", text)


def test_a_rank_that_enters_fewer_regions_with_collectives_is_named_with_the_line() -> None:
    """Two of three blocks compiled on rank 1: the same graphs, so that no layer differs."""
    found = check(rank(0, entered(3, compile_id="0/0")), rank(1, entered(2, compile_id="0/0")))
    assert (found.status, found.ranks, found.line) == (Status.FAIL, (1,), BLOCK)
    assert found.cause == Cause.COMPILE_DISABLED
    assert times_by_rank(found.observed) == [("3", "0"), ("2", "1")]
    assert "app/model.py:3 " in found.observed and "target/first" in found.observed


def test_a_call_in_which_nothing_compiles_counts_as_one_with_collectives_too() -> None:
    first = entered(3, compile_id="0/0")
    found = check(rank(0, first, entered(30, phase="target/steady")), rank(1, first))
    assert (found.status, found.ranks) == (Status.FAIL, (1,)) and "0 times" in found.observed


def test_equal_counts_are_green() -> None:
    assert check(*(rank(number, entered(3, compile_id="0/0")) for number in (0, 1))).status == Status.PASS


def test_more_calls_without_collectives_on_one_rank_are_listed_and_green() -> None:
    both, metric = entered(3, compile_id="0/0"), entered(2, METRIC, "target/steady", "1/0")
    found = check(rank(0, both, metric), rank(1, both))
    assert found.status == Status.PASS
    (line,) = found.details
    assert times_by_rank(line) == [("2", "0"), ("0", "1")] and "app/metric.py:9 " in line and "target/steady" in line


def test_groups_of_an_axis_are_counted_apart() -> None:
    found = check(
        rank(0, entered(3, compile_id="0/0"), domain="tp 0"), rank(1, entered(2, compile_id="0/0"), domain="tp 1")
    )
    assert found.status == Status.PASS


def test_what_was_not_counted_is_not_called_equal() -> None:
    assert check(rank(0), rank(1)).status == Status.SKIPPED
