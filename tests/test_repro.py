"""Known upstream bugs: still there as their file says, and what it says helps does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.recording import CaptureSession
from tpcompile.testing import run_on_ranks

REPRO = Path(__file__).parents[1] / "repro"


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, REPRO / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _worker() -> dict[str, Any]:
    module = _module("inductor_all_reduce_of_cat")
    found: dict[str, Any] = {}
    for program in (module.packed, module.kept_apart):
        with CaptureSession() as session:
            error = module.error(program, torch.device("cpu"))
            digest = digest_rank(session.record(rank=0, world_size=2))
        found[program.__name__] = error, [(item.text, str(item.line)) for item in digest.overwritten]
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker)


def test_inductor_overwrites_what_went_into_a_packed_all_reduce_unless_it_is_kept_apart(ranks: Any) -> None:
    for found in ranks:
        assert found["packed"][0] > 0.1, "torch is right now: drop the repro, the check and what docs/tp-maths.md says"
        assert found["kept_apart"][0] < 1e-5


def test_the_gate_sees_it_in_the_generated_code_and_names_the_line(ranks: Any) -> None:
    for found in ranks:
        ((text, line),) = found["packed"][1]
        assert "#0 of packed" in text and "inductor_all_reduce_of_cat.py" in line
        assert found["kept_apart"][1] == []


def test_a_hook_on_the_compiled_module_itself_is_a_region_of_its_own(fresh_compiler: None) -> None:
    module = _module("hook_of_compiled_module")
    hooked = module.hooked()
    regions, breaks = module.regions_per_call(hooked)
    assert regions > 1, "torch has it in one graph now: drop the repro and what docs/adapters.md says of it"
    assert breaks == 0
    assert module.regions_per_call(lambda x: hooked(x)) == (1, 0)


@pytest.mark.slow
@pytest.mark.tp(world_size=2)
def test_transformers_reduces_accumulated_gradients_of_qk_norms_again() -> None:
    pytest.importorskip("transformers")
    errors = _module("transformers_norm_grad_accumulation").errors
    assert max(errors(num_backward=1).values()) < 1e-5
    accumulated = errors(num_backward=2)
    wrong = {name.rpartition("self_attn.")[2] for name, error in accumulated.items() if error > 1e-5}
    assert wrong == {"q_norm.weight", "k_norm.weight"}, "transformers is right now: drop the repro and its row"


@pytest.mark.slow
@pytest.mark.tp(world_size=2)
@pytest.mark.skipif(torch.__version__ < "2.13", reason="seen on torch 2.13; torch 2.11 compiles once")
def test_the_second_step_of_qwen3_compiles_again_unless_an_eager_one_came_first() -> None:
    pytest.importorskip("transformers")
    graphs = _module("transformers_second_step_compile").graphs_per_step
    assert graphs("Llama") == [1, 0, 0]
    assert graphs("Qwen3") == [1, 1, 0], (
        "transformers compiles once now: drop the repro and its row in docs/adapters.md"
    )
    assert graphs("Qwen3", eager_first=True) == [1, 0, 0]


def test_inductor_leaves_out_the_scale_of_a_sum_with_a_product() -> None:
    module = _module("inductor_add_alpha")
    wrong = {name: module.error(getattr(module, name)) for name in ("added", "added_to")}
    assert min(wrong.values()) > 1, "torch is right now: drop the repro, its row and its entry in doctor/known.toml"
    assert module.error(module.added, backend="aot_eager") == 0.0
    assert module.error(module.written_out) < 1e-5


@pytest.mark.tp(world_size=1)
@pytest.mark.skipif(torch.__version__ < "2.13", reason="seen on torch 2.13")
def test_a_plan_with_gradients_cannot_be_compiled_for_a_second_length() -> None:
    outcome = _module("dtensor_second_length").outcome
    assert "RecursionError" in outcome(), "torch is right now: drop the repro and what docs/own-model.md says of it"
    assert outcome(has_gradients=False) == ""
