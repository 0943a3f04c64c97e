"""The gate on graphs whose sums are by size: green where they are right, red where one is dropped, doubled or wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.by_size.rows import IN_FLIGHT
from tests.gate.runs import GateRun, run_many
from tpcompile.evidence.records import CheckId, Status
from tpcompile.evidence.rundir import RunDir

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
TARGET = Path(__file__).parent / "by_size.py"
OP = "torch.ops.tpcompile.all_reduce_by_size.default("
DECLARED = CheckId.SCHEDULE.text
BY_SIZE = ["compile.all_reduce=by_size", "gate.steady_calls=3", "gate.resized_seq_len=16", "block.num_layers=1"]
PUSHED = ("all_reduce_push_product.default(", "all_reduce_push_start.default(", "all_reduce_push_receive.default(")
RED = {
    "dropped_result": (CheckId.SCHEDULE, "its result dropped"),
    "double_copy": (CheckId.GRADIENTS, "declared backward all_reduce"),
    "local_norm": (CheckId.FORWARD, DECLARED),
}
"""Fault -> a check that fails, and what the summary says."""
TRAINED = ("", "double_copy")
"""A backward takes half the time, and the other faults are in the forward."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    jobs: dict[str, dict[str, Any]] = {}
    for name in ("", *RED):
        jobs[name or "clean"] = {
            "preset": "cpu_smoke", "device": "cpu", "train": name in TRAINED, "fault": name, "overrides": BY_SIZE,
        }  # fmt: skip
    return run_many(tmp_path_factory.mktemp("by_size"), jobs, target=TARGET)


def test_a_right_block_is_green_and_every_rank_ran_the_op_forward_and_backward(runs: dict[str, GateRun]) -> None:
    run = runs["clean"]
    assert run.judged.status == Status.PASS, run.judged.summary
    for record in RunDir(run.run_dir).read_records():
        (compiled,) = [one for one in record.compiles if one.phase == "C/first"]
        code = {phase: "" for phase in ("forward", "backward")}
        for kernel in compiled.kernels:
            code[kernel.phase] += kernel.code
        assert {phase: text.count(OP) for phase, text in code.items()} == {"forward": 1, "backward": 1}
        assert [code["forward"].count(op) for op in PUSHED] == [2, 0, 2]
        assert [code["backward"].count(op) for op in PUSHED] == [0, 2, 2]
        assert {one.op for one in compiled.collectives} == {"all_reduce"}
        assert dict(record.environment)["all_reduce of TransformerStack"].startswith(
            f"by_size, table {IN_FLIGHT.digest}"
        )


@pytest.mark.parametrize("name", RED)
def test_what_is_wrong_with_a_sum_is_named_as_before(runs: dict[str, GateRun], name: str) -> None:
    check, says = RED[name]
    assert runs[name].judged.status == Status.FAIL
    assert check in runs[name].failed()
    assert says in runs[name].judged.summary
