"""Programs as users of transformers, DTensor, torchtitan, gpt-fast, FSDP2 and diffusers write them: green and right."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest
import torch

from tests.adapters.programs import ADAPTERS, Adapter, run_edited
from tpcompile.evidence.records import CheckId

TOLERANCE = 1e-5  # float32, relative to the largest element
CHOSEN = (
    "transformers Llama",
    "DTensor plan, sequence parallel",
    "per block, as torchtitan",
    "hooks, as gpt-fast",
    "FSDP2 and TP",
    "diffusers Wan block",
)


def needed(adapter: Adapter) -> Adapter:
    if adapter.needs and util.find_spec(adapter.needs) is None:
        pytest.skip(f"{adapter.needs} is not installed")
    return adapter


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_healthy_program_is_green_with_no_break_and_right_against_one_device(name: str, tmp_path: Path) -> None:
    adapter = needed(ADAPTERS[name])
    outcome = run_edited(adapter, adapter.smaller, tmp_path, backend="aot_eager")
    assert outcome.returncode == 0, outcome.text
    assert f"PASS (exit 0): {adapter.nproc} ranks agree" in outcome.text, outcome.text
    assert outcome.number(r"compiled: (\d+) graph") and outcome.number(r"graph breaks: (\d+)") == 0
    assert outcome.errors is not None
    forward, gradients = outcome.errors
    assert forward < TOLERANCE and (gradients is None or gradients < TOLERANCE)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="its graph breaks with torch 2.11 and transformers 5.17")
def test_the_custom_op_of_mixtral_is_red_until_it_is_declared(tmp_path: Path) -> None:
    adapter = needed(ADAPTERS["transformers Mixtral"])
    undeclared = (", tp_aware=RIGHT_ON_A_SHARD)", ")")
    outcome = run_edited(adapter, [undeclared, *adapter.smaller], tmp_path, backend="eager")
    assert f"FAIL (exit 1): {CheckId.TP_AWARE.text}: transformers::grouped_mm_fallback" in outcome.flat


@pytest.mark.slow
def test_a_wrong_plan_that_is_wrong_alike_on_all_ranks_is_seen_in_the_numbers_alone(tmp_path: Path) -> None:
    """All ranks agree on a model without the all-reduce: `check` compares ranks, the example's last line numbers."""
    adapter = ADAPTERS["hooks, as gpt-fast"]
    unreduced = [('        return funcol.all_reduce(output, "sum", group)\n', "        return output\n")]
    outcome = run_edited(adapter, [*unreduced, *adapter.smaller], tmp_path, backend="eager")
    assert "PASS (exit 0)" in outcome.text
    assert outcome.errors is not None and outcome.errors[0] > 1000 * TOLERANCE
