"""The gate with fast paths in the block, their kernels in Triton's interpreter, on two ranks; and with faults.

One launch runs all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.gate.reds import Red, check_named
from tests.gate.runs import GateRun, run_fresh_gate, run_many
from tpcompile.evidence.records import CheckId, Layer, Status, Verdict

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
OVERRIDES = ("gate.steady_calls=1", "block.seq_len=2", "gate.resized_seq_len=2")
LONGER = "block.seq_len=3"
"""One job compiles for a second length, which costs as much as the first."""
AOT, EAGER = ("compile.backend=aot_eager", *OVERRIDES), ("compile.backend=eager", *OVERRIDES)
ALL = "compile.fast_paths=all"
OPS, DECLARED = CheckId.TP_AWARE, CheckId.SCHEDULE
WRONG_FROM_WO = r"^forward right: worst .* first wrong in layers\.0\.attention\.wo"
"""What is wrong within attention, between its projections, shows in the output of the last one."""

WITH_FAST_PATHS = {
    "local_norm": Red(check=CheckId.FORWARD, summary=DECLARED.text, detail=r"first wrong in layers\.0\.attention"),
    "no_grad_norm": Red(
        check=CheckId.GRADIENTS,
        summary="declared backward all_reduce",
        detail=r"grad layers\.0\.attention\.qk_norm\.q_norm\.weight: infx",
        train=True,
    ),
    "shifted_positions": Red(
        check=CheckId.FORWARD,
        summary=WRONG_FROM_WO,
        code="table_SR.roll(-first, 0)",
        detail=r"aten\.roll in .* at .*calls\.py:\d+ .*: its result has the numbers of the reference in a different",
    ),
    "positions_of_the_rank": Red(
        check=Layer.GUARDS,
        summary=r"rank-dependent constant: self\.layers\.0\.attention\.fast_path.* == 0 / 1 .ranks 0-1 differ",
        ranks=(0, 1),
        code="table_SR.roll(-first, 0)",
        divergence=r"attention\.fast_path.* == 0 / 1",
    ),
    "averaged_statistics": Red(
        check=DECLARED,
        summary=r"all_reduce\(avg\).*declared forward all_reduce\(sum\)",
        detail=r"calls\.py:\d+ in average",
    ),
    "divided_statistics": Red(
        check=CheckId.FORWARD,
        summary=WRONG_FROM_WO,
        code="all_reduce(sums_BS2) / context.world_size",
        detail=r"aten\.div in .* at .*calls\.py:\d+ in divided: its result is 1/2 of the reference",
    ),
}
"""Faults of what the fast paths compute and exchange; those outside of them are in test_faults.py."""

NORM = "add_modulated_norm"
FAULTS = {
    "edited_kernel": Red(
        check=OPS,
        summary="tpcompile::modulated_norm",
        code="return self.fast_path(x_BSD, branch_BSD, *modulation",
        detail=rf"^{NORM}: refused: fast path {NORM} at .*token_norm\.py:\d+.* its certificate is for source \w+, and "
        rf"this is \w+; run `tpcompile certify {NORM} --import MODULE`",
    ),
    "single_gpu_kernel": Red(
        check=OPS,
        summary=r"FastPathError in phase C/eager: fast path qkv_pack_rmsnorm_rope is not TP-aware \(tp=none\).* of 2",
        code="return fast_path(qkv, *weights, cos_SR, sin_SR",
        detail=r"^qkv_pack_rmsnorm_rope: refused: fast path qkv_pack_rmsnorm_rope is declared tp=none, at .*qkv_pack",
    ),
}
"""Faults in the fast paths. A call in eager raises, which ends the process: the last job."""


SMALLER = "block.cross_attention=false"
"""Neither a fast path nor a fault is in it."""


def job(fault: str = "", *overrides: str, train: bool = False) -> dict[str, Any]:
    wanted = {"overrides": list(overrides), "fault": fault, "train": train}
    return {"preset": "wan21_smoke", "device": "cpu", **wanted}


JOBS = {
    "all": job("", ALL, *AOT, LONGER, train=True),
    "measured": job("", *EAGER, SMALLER),
    **{
        name: job(name, ALL, *(AOT if red.train else EAGER), SMALLER, train=red.train)
        for name, red in WITH_FAST_PATHS.items()
    },
    **{name: job(name, *EAGER, SMALLER) for name in FAULTS},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    pytest.importorskip("triton")
    return run_many(tmp_path_factory.mktemp("gates"), JOBS, environ={**os.environ, "TRITON_INTERPRET": "1"})


def statuses(verdict: Verdict) -> dict[str, str]:
    (check,) = (check for check in verdict.checks if check.id == CheckId.TP_AWARE)
    return dict(detail.split(": ", 1) for detail in check.details if ": " in detail)


def test_with_all_fast_paths_it_is_one_graph_with_right_numbers(runs: dict[str, GateRun]) -> None:
    verdict = runs["all"].judged
    assert verdict.exit_code == 0, verdict.summary
    used = statuses(verdict)
    assert used["qk_norm_rope"] == used["add_modulated_norm"] == "used"
    assert used["qk_norm_rope for 4 tokens of 32, 32, 4 in float32 at tp 2 (interleaved, train)"].startswith("used: ")
    names = {check.layer or check.id: check.status for check in verdict.checks}
    assert names[CheckId.GRAPHS] == names[CheckId.UNBROKEN] == names[CheckId.GRADIENTS] == Status.PASS


@pytest.mark.parametrize("name", WITH_FAST_PATHS)
def test_a_fault_around_fast_paths_is_named(runs: dict[str, GateRun], name: str) -> None:
    check_named(runs[name], WITH_FAST_PATHS[name])
    used = [path for path, status in statuses(runs[name].judged).items() if status == "used"]
    assert {"qk_norm_rope", "add_modulated_norm"} <= set(used)


def test_a_norm_over_the_shard_misses_its_collective(runs: dict[str, GateRun]) -> None:
    assert "all_reduce(sum) f32[1, 2, 2]" in runs["local_norm"].judged.summary


@pytest.mark.parametrize("name", FAULTS)
def test_a_fast_path_that_is_wrong_on_shards_is_named(runs: dict[str, GateRun], name: str) -> None:
    check_named(runs[name], FAULTS[name])


def test_what_was_not_measured_here_is_left_to_inductor(runs: dict[str, GateRun]) -> None:
    assert runs["measured"].judged.exit_code == 0
    found = statuses(runs["measured"].judged)
    why = "not applicable: not measured on interpreter for this shape class"
    assert found["qk_norm_rope for 2 tokens of 32, 32, 4 in float32 at tp 2 (interleaved)"] == why
    assert found["qk_norm_rope"].startswith("not applicable: ")


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("preset", "path"), [("cpu_smoke", "qk_norm_rope_exchange"), ("llama_smoke", "all_reduce_add_rms_norm")]
)
def test_kernels_of_ranks_that_share_a_gpu_exchange_with_each_other(preset: str, path: str, tmp_path: Path) -> None:
    wanted = ("--preset", preset, "--set", "compile.fast_paths=all")
    run = run_fresh_gate(tmp_path / "run", *wanted, device="one_gpu")
    assert run.exit_code == 0, run.stderr
    assert statuses(run.judged)[path] == "used"
