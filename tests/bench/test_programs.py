"""Every program computes what a single device computes, forward and gradients; a wrong one does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import on_ranks
from tpcompile.by_size.table import shipped
from tpcompile.ranks.pool import run_on_ranks

LIMIT = 2.5
PEERS = ["dtensor", "dtensor_sp"]
GROUPED = ["block.num_kv_heads=2", "block.qk_norm=full", "block.bias=true"]
WRONG = "tests.bench.programs:unsummed"


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
    programs = ["eager", *PEERS, WRONG] + ([] if train else ["A", "hooks"])
    for found in run_on_ranks(on_ranks.errors, programs, preset, overrides, train, str(tmp_path)):
        wrong = found.pop(WRONG)
        assert max(found.values()) <= LIMIT, found
        assert wrong > 100


@pytest.mark.slow
@pytest.mark.parametrize("qk_norm", ["none", "per_head"])
def test_transformers_computes_the_same_under_its_own_plan(qk_norm: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    overrides = [f"block.qk_norm={qk_norm}"]
    for found in run_on_ranks(on_ranks.errors, ["transformers"], "llama_smoke", overrides, False, str(tmp_path)):
        assert found["transformers"] <= LIMIT


@pytest.mark.slow
def test_by_size_is_a_setting_of_the_compile_and_its_row_names_the_table(tmp_path: Path) -> None:
    for error, notes in run_on_ranks(on_ranks.compiled, "C:by-size", str(tmp_path)):
        assert error <= LIMIT
        assert notes == (f"by_size, table {shipped().digest}: nccl (2 x cpu)",)
