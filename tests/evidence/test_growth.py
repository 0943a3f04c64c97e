"""Work of a comparison: linear in the compiles of a rank and in the ranks. Calls are counted, no time is measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from tests.evidence import samples
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import capture_rules, conclude, fetch_from
from tpcompile.evidence.logs.domains import by_groups, roles_of
from tpcompile.evidence.records import CompileRecord, RankRecord

SMALL, TIMES = 80, 4


def counted(work: Callable[[], object]) -> int:
    """Calls of functions, those in C included, that the work makes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def function(number: int, **fields: object) -> CompileRecord:
    """The compile of a function of its own."""
    values = {"function": f"f{number}", "line": samples.line(number + 1), "compile_id": f"{number}/0"} | fields
    return samples.compiled(samples.call("mul", "%0", str(number)), **values)


def functions(number: int, **fields: object) -> list[CompileRecord]:
    """As many functions, compiled once each."""
    return [function(n, **fields) for n in range(number)]


def variants(number: int) -> list[CompileRecord]:
    """One function, compiled as often since a guard failed."""
    reasons = [tuple(f"0/{m}: L['self'].scale == {m}" for m in range(n - 1, -1, -1)[:8]) for n in range(number)]
    return [
        function(0, compile_id=f"0/{n}", guards=(samples.guard(says=f"== {n}"),), recompile_reasons=reasons[n])
        for n in range(number)
    ]


def ranks(*compiles: list[CompileRecord]) -> list[RankRecord]:
    """A rank for each of these."""
    return [samples.record(rank, *found, world_size=len(compiles)) for rank, found in enumerate(compiles)]


CASES: dict[str, Callable[[int], list[RankRecord]]] = {
    "functions of one rank alone": lambda n: ranks(functions(n), functions(1)),
    "of a rank whose peer compiled nothing": lambda n: ranks(functions(n), []),
    "without collectives": lambda n: ranks(functions(n, collectives=()), functions(1, collectives=())),
    "recompiles of one rank alone": lambda n: ranks(variants(n), variants(1)),
    "equal compiles under one id": lambda n: ranks([function(0)] * n, [function(0)] * (n - 1)),
    "different functions on each rank": lambda n: ranks(functions(2 * n)[:n], functions(2 * n)[n:]),
    "the same in reverse order": lambda n: ranks(functions(n), functions(n)[::-1]),
    "equal ranks": lambda n: ranks(*[functions(2)] * n),
    "ranks that all differ in one compile": lambda n: ranks(*([function(0, function=f"f{m}")] for m in range(n))),
    "half of the ranks compiled more": lambda n: ranks(*(functions(1 + m % 2) for m in range(n))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_comparison_is_linear(case: str) -> None:
    def work(number: int) -> int:
        records = CASES[case](number)
        digests = [digest_rank(record) for record in records]
        rules = capture_rules(timeout_s=1)
        return counted(lambda: conclude(rules, digests, fetch_from(records), world_size=len(records)))

    work(2)  # what is cached once
    assert work(SMALL * TIMES) < 1.3 * TIMES * work(SMALL)


@pytest.mark.parametrize(
    "groups",
    [
        lambda n: {rank: [str(rank), str(rank + 1)] for rank in range(n)},  # a chain of pipeline stages
        lambda n: {rank: ["0", *map(str, range(n // 10))] for rank in range(10)},
    ],
)
def test_domains_and_roles_are_linear(groups: Callable[[int], dict[int, list[str]]]) -> None:
    def work(number: int) -> int:
        found = groups(number)
        return counted(lambda: (by_groups(found), roles_of(found)))

    assert work(1000 * TIMES) < 1.3 * TIMES * work(1000)


def test_work_that_is_quadratic_is_found() -> None:
    """The negative control: a list that is searched for each of its elements."""

    class Value:
        def __eq__(self, other: object) -> bool:
            return self is other

    def work(number: int) -> int:
        values = [Value() for _ in range(number)]
        return counted(lambda: [values.index(value) for value in values])

    assert work(SMALL * TIMES) > 1.3 * TIMES * work(SMALL)
