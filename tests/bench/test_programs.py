"""Every program computes what a single device computes, forward and gradients; a wrong one does not."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from scripts.bench_peers import run as peers_run
from tests.bench import on_ranks
from tpcompile.bench.contract import Program
from tpcompile.bench.names import Name
from tpcompile.bench.programs import Results
from tpcompile.bench.single_device import Expected, Given
from tpcompile.by_size.table import shipped
from tpcompile.nn.block import BlockInputs
from tpcompile.ranks.pool import run_on_ranks

LIMIT = 2.5
FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "bench_peers"
DTENSOR, DTENSOR_SP, HOOKS, ASYNC_TP = (
    f"{FOLDER}/peers.py:{name}" for name in ("dtensor", "dtensor_sp", "hooks", "async_tp")
)
TRANSFORMERS = f"{FOLDER}/hf.py:transformers_tp"
GROUPED = ["block.num_kv_heads=2", "block.qk_norm=full", "block.bias=true"]
OWN = "tests.bench.programs"
WRONG = f"{OWN}:unsummed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "overrides", "train"),
    [
        ("cpu_smoke", ["block.num_layers=2"], False),
        ("cpu_smoke", ["block.rope=interleaved", "block.batch=2"], True),
        ("llama_smoke", [], True),
        ("llama_smoke", GROUPED, False),
        ("llama_smoke", ["block.qk_norm=none"], False),
    ],
)
def test_outputs_and_gradients_are_those_of_a_single_device(
    preset: str, overrides: list[str], train: bool, tmp_path: Path
) -> None:
    programs = ["eager", DTENSOR, DTENSOR_SP, WRONG] + ([] if train else ["A", HOOKS])
    for found in run_on_ranks(on_ranks.errors, programs, preset, overrides, train, str(tmp_path)):
        wrong = found.pop(WRONG)
        assert max(found.values()) <= LIMIT, found
        assert wrong > 100


@pytest.mark.slow
@pytest.mark.parametrize("qk_norm", ["none", "per_head"])
def test_transformers_computes_the_same_under_its_own_plan(qk_norm: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    overrides = [f"block.qk_norm={qk_norm}"]
    for found in run_on_ranks(on_ranks.errors, [TRANSFORMERS], "llama_smoke", overrides, False, str(tmp_path)):
        assert found[TRANSFORMERS] <= LIMIT


@pytest.mark.slow
def test_by_size_is_a_setting_of_the_compile_and_its_row_names_the_table(tmp_path: Path) -> None:
    for error, notes in run_on_ranks(on_ranks.compiled, "C:by-size", str(tmp_path)):
        assert error <= LIMIT
        assert len(notes) == 1 and shipped().digest in notes[0]


@pytest.mark.slow
def test_a_target_of_the_gate_is_compared_with_its_own_reference(tmp_path: Path) -> None:
    right, wrong = [f"{OWN}:{name}" for name in ("model", "pair", "trained")], f"{OWN}:wrong_model"
    for found in run_on_ranks(on_ranks.errors, [*right, wrong], "cpu_smoke", [], False, str(tmp_path)):
        assert found.pop(wrong) > 100
        assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
def test_the_program_of_the_page_is_one(tmp_path: Path) -> None:
    page = (FOLDER.parents[1] / "docs" / "bench.md").read_text()
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "my_model.py").write_text(text)
    program = f"{tmp_path}/my_model.py:build"
    for found in run_on_ranks(on_ranks.errors, [program], "cpu_smoke", [], False, str(tmp_path)):
        assert found[program] <= LIMIT


def test_a_model_of_ones_own_without_a_reference_is_told_to_give_one() -> None:
    one = torch.ones(2, 3)
    block = Given(
        weights={}, inputs=BlockInputs(one, one, one), cotangent=None,
        single={"forward": one}, exact={"forward": one.double()},
    )  # fmt: skip
    expected = Expected(Program(program=torch.relu, inputs=()), block)
    assert expected.error(Results(one)) == (0.0, "forward")
    assert expected.error(Results(one / 0)) == (math.inf, "forward")
    for output in (torch.ones(5), None):
        error, worst = expected.error(Results(output))
        assert error == math.inf and "reference" in worst


REFUSED = [
    (DTENSOR, "wan21_smoke", [], False, "norm=layer"),
    (HOOKS, "cpu_smoke", [], True, "inference"),
    (DTENSOR_SP, "cpu_smoke", ["block.seq_len=15"], False, "tp=2 does not divide 15 tokens"),
    (ASYNC_TP, "cpu_smoke", [], False, "needs GPUs and Inductor"),
    (f"{OWN}:nothing", "cpu_smoke", [], False, "returned NoneType; return a tpcompile.Target"),
    (f"{OWN}:nowhere", "cpu_smoke", [], False, "has no function nowhere"),
]
"""Program, preset, overrides, train, and why it cannot be built."""


@pytest.mark.slow
def test_a_program_that_cannot_be_built_says_why() -> None:
    for found in run_on_ranks(on_ranks.refusals, [tuple(case[:4]) for case in REFUSED]):
        assert [case[4] in text for case, text in zip(REFUSED, found, strict=True)] == [True] * len(REFUSED), found


def test_the_script_of_the_peers_knows_them_by_their_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    given = ["--program", "C:graphed", "--program=dtensor:graphed", "--without", "hooks", "--rounds", "2"]
    peers = "scripts/bench_peers/peers.py"
    assert list(peers_run.arguments_of(given)) == [
        *("--program", "C:graphed", "--program", f"{peers}:dtensor:graphed", "--without", f"{peers}:hooks"),
        *("--rounds", "2"),
    ]
    every = list(peers_run.arguments_of([]))[1::2]
    assert {"C", "compute:graphed", f"{peers}:hooks:graphed"} <= set(every)
    assert all(Name.of(text) for text in every)
