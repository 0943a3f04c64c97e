"""A verdict fits a screen at any number of ranks, and still says which of them differ."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from tests.evidence import samples
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.equal_ranks import equal_ranks
from tpcompile.evidence.judgement.verdict import Absent, capture_rules, conclude, fetch_from
from tpcompile.evidence.records import RankRecord, Verdict
from tpcompile.report import github, junit, show

SCREEN = 60
"""Lines of a red verdict in a terminal, panels and tables of its checks included."""
TP = 4
HOST = 16
"""Ranks of a host."""
EQUAL, ODD = (samples.compiled(samples.call("mul", "%0", number), samples.reduce("%1")) for number in "23")


def record(rank: int, world_size: int, *, is_odd: bool, in_groups: bool = True) -> RankRecord:
    first = rank // TP * TP
    place = {"domain": f"tp {first}-{first + TP - 1}", "coordinate": rank % TP} if in_groups else {"domain": "tp"}
    compile_ = ODD if is_odd else EQUAL
    return samples.record(rank, compile_, world_size=world_size, counters=(samples.counters(),), **place)


CASES: dict[str, Callable[[int, int], RankRecord]] = {
    "equal": lambda rank, size: record(rank, size, is_odd=False),
    "one": lambda rank, size: record(rank, size, is_odd=rank == 37, in_groups=False),
    "one of a group": lambda rank, size: record(rank, size, is_odd=rank == 37),
    "tp 1 of all": lambda rank, size: record(rank, size, is_odd=rank % TP == 1),
    "every fourth": lambda rank, size: record(rank, size, is_odd=rank % TP == 1, in_groups=False),
    "without a rule": lambda rank, size: record(rank, size, is_odd=rank * rank % 7 < 3, in_groups=False),
}


@functools.cache
def verdict(case: str, world_size: int) -> Verdict:
    records = [CASES[case](rank, world_size) for rank in range(world_size)]
    digests = [digest_rank(one) for one in records]
    return conclude(capture_rules(timeout_s=1), digests, fetch_from(records), world_size=world_size)


def terminal_text(verdict: Verdict) -> str:
    """The report in a terminal."""
    out = io.StringIO()
    show.show(verdict, Console(file=out, width=120, force_terminal=True, color_system=None), run=None, command="check")
    return out.getvalue()


def shown(case: str, world_size: int, *, is_terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=is_terminal, color_system=None)
    show.show(verdict(case, world_size), console, run=None, command="check")
    return out.getvalue()


@pytest.mark.parametrize("world_size", [256, 1024])
@pytest.mark.parametrize("case", CASES)
def test_a_verdict_fits_a_screen(case: str, world_size: int) -> None:
    for is_terminal in (False, True):
        text = shown(case, world_size, is_terminal=is_terminal)
        assert len(text.splitlines()) <= SCREEN, text
        assert max(map(len, text.splitlines())) < 500


@pytest.mark.parametrize("world_size", [256, 1024])
def test_the_ranks_that_differ_are_named(world_size: int) -> None:
    last = world_size - 3
    assert f"ranks 1-{last} step 4" in shown("every fourth", world_size, is_terminal=False)
    of_groups = shown("tp 1 of all", world_size, is_terminal=False)
    assert f"tp 1 of {world_size // TP} groups, ranks 1-{last} step 4" in of_groups
    assert "rank 37" in shown("one", world_size, is_terminal=False)


def test_groups_in_which_the_same_places_are_equal_share_a_line() -> None:
    ((text, is_split),) = equal_ranks(verdict("tp 1 of all", 256))
    assert is_split and re.search(r" 64 groups .*ranks 0-255: tp 0,2-3 \| tp 1$", text)
    assert [is_split for _, is_split in equal_ranks(verdict("one of a group", 256))] == [True, False]


def test_few_groups_have_a_line_each() -> None:
    """The negative control: nothing is folded."""
    found = equal_ranks(verdict("tp 1 of all", 16))
    assert len(found) == 4 and all(is_split for _, is_split in found)


def of_several_faults(world_size: int) -> Verdict:
    """A constant on tp 1 of all groups, a further one on rank 37, and three ranks of the last host without a record."""
    lost = range(world_size - 3, world_size)
    further = samples.compiled(samples.call("mul", "%0", "9"), samples.reduce("%1"))
    records = [record(rank, world_size, is_odd=rank % TP == 1) for rank in range(world_size - 3)]
    records[38] = records[38].model_copy(update={"compiles": (further,)})
    hosts = {rank: f"node{rank // HOST + 1:03}" for rank in range(world_size)}
    digests = [digest_rank(one).model_copy(update={"host": hosts[one.rank]}) for one in records]
    absent = [Absent(rank, "unknown", hosts[rank]) for rank in lost]
    return conclude(
        capture_rules(timeout_s=1), digests, fetch_from(records), world_size=world_size, absent=absent
    )  # fmt: skip


@pytest.mark.parametrize("of_run", [github.summary, junit.render, terminal_text])
def test_several_faults_are_as_long_in_a_job_of_any_size(of_run: Callable[[Verdict], str]) -> None:
    small, large = (of_run(of_several_faults(size)).splitlines() for size in (128, 1024))
    assert abs(len(large) - len(small)) <= 3
    assert len(large) <= 110
    words = " ".join(" ".join(large).replace("│", "").split())
    assert "step 4,41-1017 step 4" in words


def test_the_hosts_of_many_ranks_are_a_range() -> None:
    verdict = of_several_faults(1024)
    assert equal_ranks(verdict)[-1][0].endswith(" host: node[001-064] 0-1023, 16 each")
    text = terminal_text(verdict)
    assert "rank 38 (node003)" in text
    assert "ranks 1021-1023 (node064)" in text
