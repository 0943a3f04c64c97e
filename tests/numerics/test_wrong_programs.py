"""Programs with wrong numbers on two ranks: the line and the kind of the mistake, and nothing for their twins."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from tests.numerics.held_out import HELD_OUT
from tests.numerics.wrong_programs import Case
from tpcompile.evidence.records import WrongOp
from tpcompile.numerics.check import check_numerics
from tpcompile.testing import run_on_ranks

CASES = {case.name: case for case in HELD_OUT}
UNNAMED = {"detached_entry"}
"""A gradient that was cut has no value that could be traced back."""
pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Found:
    passed: bool
    ops: list[tuple[WrongOp, tuple[int, ...]]]
    text: str


def _run(case: Case, *, is_wrong: bool) -> Found:
    report = check_numerics(
        lambda comm: case.build(comm, is_wrong=is_wrong),
        inputs=case.inputs, group=dist.group.WORLD, programs=("eager",), sharded=case.sharded,
    )  # fmt: skip
    return Found(report.passed, report.wrong_ops, report.text())


def worker() -> dict[tuple[str, bool], Found]:
    return {(name, wrong): _run(case, is_wrong=wrong) for name, case in CASES.items() for wrong in (True, False)}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, bool], Found]:
    first, *others = run_on_ranks(worker, world_size=2, timeout_s=200)
    assert others == [first]  # the report is the same on all ranks
    return first


def line_of(case: Case) -> int:
    lines, start = inspect.getsourcelines(case.forward)
    (place,) = [number for number, line in enumerate(lines) if line.rstrip().endswith("# fault")]
    return start + place


@pytest.mark.parametrize("name", CASES)
def test_a_twin_without_the_fault_passes(found: dict[tuple[str, bool], Found], name: str) -> None:
    assert found[name, False].passed, found[name, False].text
    assert found[name, False].ops == []


@pytest.mark.parametrize("name", CASES)
def test_the_line_and_the_kind_of_a_mistake_are_named(found: dict[tuple[str, bool], Found], name: str) -> None:
    case, run = CASES[name], found[name, True]
    assert not run.passed
    if name in UNNAMED:
        assert run.ops == []
        return
    ((op, _ranks),) = run.ops
    assert op.line is not None
    assert (op.line.line, op.kind.value) == (line_of(case), case.kind), run.text
