"""Programs with wrong numbers on two ranks: the line and the kind of the mistake, and nothing for their twins."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.numerics.held_out import HELD_OUT
from tests.numerics.held_out_second import SECOND
from tests.numerics.other_forms import OTHER_FORMS
from tests.numerics.over_places import OVER_PLACES
from tests.numerics.silent_bugs import SILENT
from tests.numerics.wrong_programs import Case
from tpcompile.evidence.records import WrongOp
from tpcompile.numerics.check import check_numerics
from tpcompile.testing import run_on_ranks

CASES = {case.name: case for case in (*SILENT, *HELD_OUT, *SECOND, *OTHER_FORMS, *OVER_PLACES)}
BESIDE = {
    "detached_entry": "the branch whose gradient is cut begins one line above",
    "keys_of_the_other_heads": "the part is taken one line above its use",
    "loss_of_shared_scores": "the gradient of what is used there is summed by the collective one line above",
}
"""Programs for which a line beside the marked one is named."""
OTHER_KIND = {"rows_of_the_next_rank", "token_shift_across_the_border", "output_that_does_not_fade"}
"""Programs whose kind is not told."""
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
    """The marked line of the forward; a mark with a name may be in a function that it calls."""
    lines, start = inspect.getsourcelines(case.forward)
    if case.mark != "fault":
        lines, start = Path(inspect.getfile(case.forward)).read_text().splitlines(), 1
    (place,) = [number for number, line in enumerate(lines) if line.rstrip().endswith(f"# {case.mark}")]
    return start + place


@pytest.mark.parametrize("name", CASES)
def test_a_twin_without_the_fault_passes(found: dict[tuple[str, bool], Found], name: str) -> None:
    assert found[name, False].passed, found[name, False].text
    assert found[name, False].ops == []


@pytest.mark.parametrize("name", CASES)
def test_the_line_and_the_kind_of_a_mistake_are_named(found: dict[tuple[str, bool], Found], name: str) -> None:
    case, run = CASES[name], found[name, True]
    assert not run.passed
    ((op, _ranks),) = run.ops
    assert op.line is not None
    assert op.line.line == line_of(case) - (name in BESIDE), run.text
    assert op.kind.value == ("" if name in OTHER_KIND else case.kind), run.text
