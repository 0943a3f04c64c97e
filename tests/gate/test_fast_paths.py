"""The gate with fast paths in the block, their kernels in Triton's interpreter, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gate.runs import MANY, run_fresh_gate, torchrun
from tpcompile.evidence.records import CheckId, Status, Verdict
from tpcompile.evidence.rundir import RunDir

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
OVERRIDES = ["gate.steady_calls=1", "block.seq_len=3", "gate.resized_seq_len=2"]
AOT, EAGER = ("compile.backend=aot_eager", *OVERRIDES), ("compile.backend=eager", *OVERRIDES)
JOBS = {
    "all": {"overrides": ["compile.fast_paths=all", *AOT], "fault": "", "train": True},
    "wrong": {"overrides": ["compile.fast_paths=all", *EAGER], "fault": "local_norm", "train": False},
    "measured": {"overrides": EAGER, "fault": "", "train": False},
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("gates")
    jobs = {name: {"preset": "wan21_smoke", "device": "cpu", **job} for name, job in JOBS.items()}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    torchrun(folder / "err", [str(MANY), str(folder)], environ={"TRITON_INTERPRET": "1"})
    return {name: RunDir(Path(folder, name)).read_verdict() for name in jobs}


def statuses(verdict: Verdict) -> dict[str, str]:
    (check,) = (check for check in verdict.checks if check.id == CheckId.TP_AWARE)
    return dict(detail.split(": ", 1) for detail in check.details)


def test_with_all_fast_paths_it_is_one_graph_with_right_numbers(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["all"]
    assert verdict.exit_code == 0, verdict.summary
    used = statuses(verdict)
    assert used["qk_norm_rope"] == used["add_modulated_norm"] == "used"
    assert used["qk_norm_rope for 4 tokens of 32, 32, 4 in float32 at tp 2 (interleaved, train)"].startswith("used: ")
    names = {check.name: check.status for check in verdict.checks}
    assert names["one graph"] == names["graph breaks"] == names["gradients right"] == Status.PASS


def test_a_norm_over_the_shard_is_red_with_fast_paths_too(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["wrong"]
    red = {check.name for check in verdict.checks if check.is_red}
    assert verdict.exit_code == 1 and {"forward right", "collectives as declared by the block"} <= red
    assert "all_reduce(sum) f32[1, 3, 2]" in verdict.summary


def test_what_was_not_measured_here_is_left_to_inductor(verdicts: dict[str, Verdict]) -> None:
    assert verdicts["measured"].exit_code == 0
    found = statuses(verdicts["measured"])
    why = "not applicable: not measured on interpreter for this shape class"
    assert found["qk_norm_rope for 4 tokens of 32, 32, 4 in float32 at tp 2 (interleaved)"] == why
    assert found["qk_norm_rope"] == "not applicable: no compiled graph calls it"


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("preset", "path"), [("cpu_smoke", "qk_norm_rope_exchange"), ("llama_smoke", "all_reduce_add_rms_norm")]
)
def test_kernels_of_ranks_that_share_a_gpu_exchange_with_each_other(preset: str, path: str, tmp_path: Path) -> None:
    wanted = ("--preset", preset, "--set", "compile.fast_paths=all")
    run = run_fresh_gate(tmp_path / "run", *wanted, device="one_gpu")
    assert run.exit_code == 0, run.stderr
    assert statuses(run.judged)[path] == "used"
