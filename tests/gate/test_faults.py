"""Every known fault turns the gate red, and the verdict names its cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gate import test_fast_paths
from tests.gate.reds import Red, check_named
from tests.gate.runs import AOT, TRACED_TARGET, GateRun, compare_offline, run_fresh_gate, run_gate, run_many
from tpcompile.evidence.records import CheckId, Layer
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate import faults
from tpcompile.gate.replay import replay
from tpcompile.recording import CaptureSession

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


EAGER = ("compile.backend=eager",)
"""What Dynamo captures is enough for most, in half the time."""
SAME_LENGTH = "gate.resized_seq_len=16"
"""A different length compiles once more."""
NO_NORM = "block.qk_norm=none"
"""The norm of queries and keys is a quarter of what is compiled."""
IN_NORM = ("disabled_collective", "local_norm", "double_copy")
"""Faults that show in it."""

FORWARD, GRAPH, DECLARED = CheckId.FORWARD, Layer.GRAPH, CheckId.SCHEDULE
GUARDED = Layer.GUARDS
PRINT = 'print("", end="")'

SHARED = {
    "disabled_collective": Red(
        check=CheckId.UNBROKEN,
        summary=r"graph break: \d+ breaks, the first: .*`torch\.compiler\.disable`",
        code='self.comm.all_reduce(local_2, dst="R")',
    ),
    "leading_print": Red(check=CheckId.UNBROKEN, summary=r"^graph break: .*program\.py:\d+ in forward", code=PRINT),
    "trailing_print": Red(check=CheckId.UNBROKEN, summary=r"^graph break: .*program\.py:\d+ in forward", code=PRINT),
    "one_rank_print": Red(
        check=CheckId.UNBROKEN,
        summary=r"^graph break: .*\(rank 1\)",
        ranks=(1,),
        code=PRINT,
        divergence=r"graph break: .* on rank 1 only",
    ),
    "rank_branch": Red(
        check=GUARDED,
        summary="rank-dependent branch: self.rank == 0 / 1",
        ranks=(0, 1),
        code="if self.rank == 0:",
        divergence="self.rank",
    ),
    "rank_constant": Red(
        check=GUARDED,
        summary="rank-dependent constant: self.rank == 0 / 1 .ranks 0-1 differ",
        ranks=(0, 1),
        code="x = x * (self.rank + 1)",
        divergence="self.rank",
    ),
    "get_rank_constant": Red(
        check=GRAPH,
        summary=r"mul\(.*, 1\) / mul\(.*, 2\).*ranks 0-1 differ",
        ranks=(0, 1),
        code="x = x * (dist.get_rank() + 1)",
        divergence=r"mul\(.*, 1\) / mul\(.*, 2\)",
    ),
    "local_norm": Red(check=FORWARD, summary=DECLARED.text, detail=r"first wrong in layers\.0\.attention\.qk_norm"),
    "dropped_result": Red(
        check=DECLARED,
        summary="its result dropped",
        detail=r"compiled at .*faults/collectives\.py:\d+",
        lowered=True,
    ),
    "bias_before_reduce": Red(
        check=FORWARD, summary=r"first wrong in layers\.0\.attention\.wo", detail="first wrong in"
    ),
    "double_copy": Red(
        check=CheckId.GRADIENTS, summary="declared backward all_reduce", detail=r"grad layers\.0\.\S+: \d+", train=True
    ),
    "one_rank_output": Red(
        check=FORWARD,
        summary=r"expected at most .*\(rank 1\)",
        ranks=(1,),
        detail="rank 1: first wrong in the program around",
    ),
    "custom_op": Red(
        check=CheckId.TP_AWARE,
        summary="tpcompile_faults::local_scale",
        code="x = local_scale(x)",
        detail="gate.tp_aware_ops",
    ),
    "nothing_compiled": Red(check=CheckId.COMPILED, summary="^nothing was compiled: 0 graphs", exit_code=5),
}
"""Faults that leave every rank alive: one launch runs them all."""

ALONE = {
    "killed": Red(check=CheckId.REPORTED, summary=r"rank 1 is missing; last seen compiling .*died", ranks=(1,)),
    "never_starts": Red(check=CheckId.CAN_START, summary="rank 1 did not start within 8 s", ranks=(), exit_code=4),
    "never_arrives": Red(check=CheckId.ARRIVED, summary="rank 1 did not arrive .*in phase C/first", ranks=(1,)),
    "raises": Red(
        check=CheckId.NO_ERROR,
        summary=r"RuntimeError in phase C/steady: injected.*\(rank 1\)",
        ranks=(1,),
        code='raise RuntimeError("injected: this rank gives up")',
    ),
    "other_profile": Red(
        check=CheckId.NO_ERROR,
        summary=r"(?=.*\(rank 1\)).*TransformerStack has different profiles: default on rank 0 / measured on rank 1",
        ranks=(1,),
        divergence="profile of TransformerStack: default / measured",
    ),
    "other_all_reduce": Red(
        check=CheckId.NO_ERROR,
        summary=r"(?=.*\(rank 1\)).*different settings of all_reduce: nccl on rank 0 / by_size, table \w+: .*on rank 1",
        ranks=(1,),
        divergence=r"all_reduce of TransformerStack: .*by_size, table \w+: not measured on 2 x cpu: nccl",
    ),
    "other_table": Red(
        check=CheckId.NO_ERROR,
        summary=r"settings of all_reduce: by_size, table (\w+): .* on rank 0 / by_size, table (?!\1)\w+: .* on rank 1",
        ranks=(1,),
        divergence=r"all_reduce of TransformerStack: by_size, table (\w+): .* / by_size, table (?!\1)\w+",
    ),
    "single_gpu_fast_path": Red(
        check=CheckId.TP_AWARE,
        summary=r"FastPathError in phase C/eager: fast path injected_scale is not TP-aware .*; call plain_scale",
        code="x = single_gpu_scale(x)",
        detail=r"injected_scale: refused: fast path injected_scale is declared tp=none, at .*fast_path\.py:\d+",
    ),
    "fast_path_in_eager": Red(
        check=CheckId.NO_ERROR,
        summary=r"FastPathError in phase C/eager: fast path injected_scale is not TP-aware",
        ranks=None,
        code="x = single_gpu_scale(x)",
    ),
    "one_rank_compiles": Red(
        check=CheckId.AGREED,
        summary=r"rank 1 compiled all_reduce\(.*; rank 0 did not within 8 s .*\.py:\d+ in \w+",
        ranks=(0,),
        divergence="compiled on rank 1 only",
    ),
    "other_reduce_op": Red(
        check=CheckId.AGREED,
        summary=r"#0 is all_reduce\(reduce_op=max.* on rank 1 and all_reduce\(reduce_op=sum.* on rank 0",
        ranks=(0, 1),
        code='"max"',
        divergence=r"reduce_op sum / max",
    ),
}
"""Faults that end the process: a launch each."""

OPS = CheckId.TP_AWARE
COPIES = r"tpcompile\.gate\.faults\.triton_kernel\.local_scale_kernel"
UNREGISTERED = "refused: it is not registered as a fast path"
TRACED = {
    "triton_kernel": Red(
        check=OPS, summary=COPIES, code="local_scale_kernel[(triton.cdiv(x", detail=f"^{COPIES}: {UNREGISTERED}"
    ),
    "hidden_kernel": Red(
        check=OPS,
        summary="tpcompile_faults::hidden_scale",
        code="x = hidden_scale(x)",
        detail=r"hidden_scale is defined at .*triton_kernel\.py:\d+ in hidden_scale, called at .*forward",
    ),
    "backward_kernel": Red(
        check=OPS,
        summary=COPIES,
        code="local_scale_kernel[(triton.cdiv(grad",
        detail=rf"{COPIES} is defined at .*triton_kernel\.py:\d+ in local_scale_kernel, called at .*in backward",
        train=True,
    ),
    "third_party_kernel": Red(
        check=OPS,
        summary="vendored.vendored_kernel",
        code="x = self.vendored.scale(x)",
        detail=r"defined at .*/site-packages/vendored\.py:\d+ in vendored_kernel, called at .*triton_kernel\.py",
    ),
    "kernel_versions": Red(
        check=OPS,
        summary=r"source of vendored\.vendored_kernel: (\w+) / (?!\1)\w+",
        code="x = self.vendored.scale(x)",
        detail=r"defined at .*/site-packages/vendored\.py:\d+ in vendored_kernel, called at .*triton_kernel\.py",
        divergence=r"source of vendored\.vendored_kernel: (\w+) / (?!\1)\w+",
    ),
    "kernel_grids": Red(
        check=GRAPH,
        summary=rf"{COPIES}: grid=.* / grid=",
        ranks=(0, 1),
        code="local_scale_kernel[(num_blocks,)]",
        divergence=rf"^{COPIES}: grid=\[\((\d+), 1, 1\)\] / grid=\[\((?!\1)\d+, 1, 1\)\]",
        declared="local_scale_kernel",
    ),
}
"""Of Triton kernels, which are traced as on a GPU, and copied for."""


def jobs_of(reds: dict[str, Red]) -> dict[str, Any]:
    jobs = {}
    for name, red in reds.items():
        backend = AOT if red.train or red.lowered else EAGER
        overrides = [*backend, "gate.steady_calls=3", SAME_LENGTH]
        if name not in IN_NORM:
            overrides.append(NO_NORM)
        declared = [f"gate.tp_aware_ops={json.dumps([red.declared])}"] if red.declared else []
        job = {"preset": "cpu_smoke", "fault": name, "train": red.train, "device": "cpu"}
        jobs[name] = {**job, "overrides": overrides + declared}
    return jobs


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    return run_many(tmp_path_factory.mktemp("shared"), jobs_of(SHARED))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    pytest.importorskip("triton")
    return run_many(tmp_path_factory.mktemp("traced"), jobs_of(TRACED), target=TRACED_TARGET)


def test_every_fault_has_a_negative_control() -> None:
    with_fast_paths = test_fast_paths.WITH_FAST_PATHS.keys() | test_fast_paths.FAULTS.keys()
    assert SHARED.keys() | ALONE.keys() | TRACED.keys() | with_fast_paths == faults.ALL.keys()


@pytest.mark.parametrize("name", SHARED)
def test_fault_turns_the_gate_red_and_is_named(shared: dict[str, GateRun], name: str) -> None:
    check_named(shared[name], SHARED[name])


@pytest.mark.parametrize("name", TRACED)
def test_a_fused_kernel_turns_the_gate_red_and_is_named(traced: dict[str, GateRun], name: str) -> None:
    check_named(traced[name], TRACED[name])


@pytest.mark.parametrize("name", SHARED)
def test_red_verdict_is_the_same_when_it_is_replayed_from_the_records(shared: dict[str, GateRun], name: str) -> None:
    live = shared[name].judged
    again = replay(RunDir(shared[name].run_dir))
    assert [(c.name, c.status, c.observed) for c in again.checks] == [
        (c.name, c.status, c.observed) for c in live.checks
    ]
    assert (again.exit_code, again.summary, again.divergences) == (live.exit_code, live.summary, live.divergences)


def test_compare_of_a_red_run_ends_with_1_and_needs_no_torch(shared: dict[str, GateRun]) -> None:
    code, text = compare_offline(shared["rank_branch"].run_dir)
    assert code == 1, text
    assert "if self.rank == 0:" in text


@pytest.mark.parametrize("name", ALONE)
def test_fault_that_ends_the_process_is_named_and_leaves_nothing_running(name: str, tmp_path: Path) -> None:
    wait_s = 8 if "8 s" in ALONE[name].summary or name == "never_arrives" else 120
    settings = (EAGER[0], SAME_LENGTH, NO_NORM, f"gate.store_timeout_s={wait_s}")
    start = run_fresh_gate if name == "killed" else run_gate
    run = start(tmp_path / "run", "--fault", name, *(word for setting in settings for word in ("--set", setting)))
    assert run.exit_code == 1, run.stderr  # torchrun knows no other
    check_named(run, ALONE[name])
    assert run.left_running == ()


class FirstOfThree(nn.Module):
    """A stack's signature without a stack."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x.sin()


@pytest.mark.gpu(1)
def test_an_undeclared_triton_kernel_is_named(tmp_path: Path) -> None:
    run = run_fresh_gate(tmp_path / "run", "--fault", "triton_kernel", device="one_gpu")
    found = run.failed()[CheckId.TP_AWARE]
    assert "tpcompile.gate.faults.triton_kernel.local_scale_kernel" in found.observed
    assert found.line is not None
    assert "local_scale_kernel[" in found.line.code


def test_an_undeclared_triton_kernel_is_seen_in_a_graph_that_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(
        "torch.utils._triton.has_triton", lambda: True
    )  # tracing a kernel needs no GPU, running it does
    torch.compiler.reset()
    context = faults.FaultContext(rank=0, world_size=1, target=0)
    program = faults.find("triton_kernel").program(FirstOfThree(), context)
    x = torch.ones(4, 8)

    def runs_nothing(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return lambda *args: (x,)

    with CaptureSession() as session, session.phase("C/first"):
        torch.compile(program, backend=runs_nothing)(x, x, x)
    found = session.record(rank=0, world_size=2, tp_aware=["runs_nothing"]).refused_ops
    assert [item.text.partition(" ")[0] for item in found] == ["tpcompile.gate.faults.triton_kernel.local_scale_kernel"]
    assert found[0].line is not None
    assert "local_scale_kernel[" in found[0].line.code
    assert session.record(rank=0, world_size=2, tp_aware=["local_scale_kernel", "runs_nothing"]).refused_ops == ()
    assert session.record(rank=0, world_size=1).refused_ops == ()  # there are no shards
