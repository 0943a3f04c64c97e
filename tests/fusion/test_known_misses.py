"""Misses of public issues: this torch has them or not, and each is named with pair, reason and setting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import PYTHONPATH

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "repro/fusion/known_misses.py"
pytestmark = [pytest.mark.slow, pytest.mark.ranks]
IS_2_11 = torch.__version__.startswith("2.11.")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("triton")
    environ = {"PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": str(tmp_path_factory.mktemp("home"))}
    environ |= {"PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, PROGRAM, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ, check=False)
    assert ended.returncode == 1, ended.stderr
    return json.loads(ended.stdout)


def only(row: dict[str, Any]) -> dict[str, Any]:
    (missed,) = row["missed"]
    assert {line["file"].rsplit("/", 1)[-1] for line in missed["lines"]} == {"missed_programs.py"}
    return dict(missed)


def test_vllm_27699_a_matmul_and_its_reduce_scatter_are_apart_and_async_tp_is_named(rows: Any) -> None:
    found = only(rows["vLLM 27699"])
    assert found["reason"]["boundary"] == "collective"
    assert found["reason"]["text"] == "the reduce-scatter waits for the matmul"
    assert "config._micro_pipeline_tp" in found["reason"]["remedy"]


def test_vllm_27699_with_async_tp_what_lies_between_two_matmuls_stays_one_kernel(rows: Any) -> None:
    """The issue lost this fusion with torch 2.9; were it lost again, these would be more launches."""
    row = rows["vLLM 27699, async TP"]
    assert row["missed"] == []
    assert len(row["launches"]) == 3
    assert {"aten.add", "aten.clamp", "aten.reciprocal"} <= set(row["launches"][1].split())


def test_nemo_2987_async_tp_is_on_and_took_nothing_because_of_bmm(rows: Any) -> None:
    found = only(rows["NeMo 2987"])
    assert found["reason"]["text"].startswith("async TP is on and did not match")
    assert found["reason"]["text"].endswith("async TP does not look for bmm")
    assert "F.linear" in found["reason"]["remedy"]
    assert "enable_symm_mem_for_group" in only(rows["NeMo 2987, no symmetric memory"])["reason"]["remedy"]


def test_nemo_2987_what_is_proposed_helps(rows: Any) -> None:
    assert rows["NeMo 2987, mm"] == {"launches": ["symm_mem.fused_all_gather_matmul", "aten.relu"], "missed": []}


def test_pytorch_161138_a_reduction_in_two_stages_and_what_is_proposed_helps(rows: Any) -> None:
    row = rows["pytorch 161138"]
    assert len(row["launches"]) == 4
    found = only(row)
    assert found["reason"]["boundary"] == "stages of a reduction"
    assert "config.triton.cooperative_reductions" in found["reason"]["remedy"]
    assert "numel/rnumel mismatch" in found["logged"][0]
    cooperative = rows["pytorch 161138, cooperative"]
    assert cooperative == {"launches": ["zero_", "aten.abs aten.max aten.mean aten.pow"], "missed": []}


@pytest.mark.skipif(not IS_2_11, reason="torch 2.13 makes one kernel in either order")
def test_pytorch_142316_the_limit_that_put_a_product_into_memory_is_named(rows: Any) -> None:
    found = only(rows["pytorch 142316"])
    assert found["reason"]["text"].endswith("it was made in memory because of its 5 reads, more than 4")
    assert "config.realize_reads_threshold, or operands in a different order" in found["reason"]["remedy"]


def test_pytorch_142316_is_one_kernel_with_that_limit_in_a_different_order_and_with_a_newer_torch(rows: Any) -> None:
    number = {name: len(row["launches"]) for name, row in rows.items()}
    assert number["pytorch 142316, limit"] == number["pytorch 142316, different order"] == 1
    assert number["pytorch 142316"] == 1 + IS_2_11
