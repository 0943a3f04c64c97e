"""Every sentence of advice in the source has a program that it turns from red to green."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.advice.inventory import sentences
from tests.advice.pages import example
from tests.advice.test_recompiles import WAYS
from tests.advice.test_typecheck import OWN, REPAIRS
from tpcompile.evidence.digests import recompiles
from tpcompile.evidence.judgement.rank_taint import SUGGESTIONS
from tpcompile.evidence.records.causes import Cause

ROOT = Path(__file__).parents[2]
NO_GPU, KNOWN = "tests/fusion/test_no_gpu.py::test_what_is_proposed_makes_one_launch", "tests/fusion/test_no_gpu.py"
WIN = "tests/fusion/test_win.py"
SKIPPED = "tests/recording/test_regions.py::test_a_reset_after_the_call_that_broke_its_graph_makes_one_region_of_it"
EXPECTED = "tests/test_checking.py::test_as_many_graph_breaks_as_expected_are_green_and_one_more_or_fewer_are_red"
BY_HAND = "tests/typecheck/test_by_hand.py::test_a_correct_module_is_judged_whole_without_an_alarm"
TWINS = "tests/typecheck/test_realistic.py::test_a_correct_module_raises_no_alarm"
ELSEWHERE = {
    "The graph breaks in {}: move the call out": EXPECTED,
    "Remove the breaks that are not meant": EXPECTED,
    "fullgraph=True does not help: Dynamo skips": SKIPPED,
    "free it, or set TORCHINDUCTOR_CACHE_DIR": "tests/gate/test_machine.py::test_with_room_the_same_run_passes",
    "async TP: config._micro_pipeline_tp": f"{KNOWN}::test_vllm_27699_with_async_tp_what_lies_between_two_matmuls_"
    "stays_one_kernel",
    "{} before the compile": f"{KNOWN}::test_nemo_2987_what_is_proposed_helps",
    "F.linear or x @ weight": f"{KNOWN}::test_nemo_2987_what_is_proposed_helps",
    "config.triton.cooperative_reductions": f"{KNOWN}::test_pytorch_161138_a_reduction_in_two_stages_and_what_is_"
    "proposed_helps",
    "config.{}, or operands in a different order": f"{KNOWN}::test_pytorch_142316_is_one_kernel_with_that_limit_in_a_"
    "different_order_and_with_a_newer_torch",
    "config.score_fusion_memory_threshold = 0": NO_GPU,
    "config.max_fusion_size": NO_GPU,
    "config.aggressive_fusion with": NO_GPU,
    "put the operands that differ side by side": NO_GPU,
    "write it with torch's ops": NO_GPU,
    "config.max_autotune_gemm": NO_GPU,
    "make it an nn.Module": f"{WIN}::test_a_module_in_float64_with_its_tensors_as_parameters_can_be_compared",
    "TORCH_LOGS=recompiles": f"{WIN}::test_repaired_programs_are_one_graph_and_fused",
    "TORCH_LOGS=graph_breaks": f"{WIN}::test_repaired_programs_are_one_graph_and_fused",
    "pad inputs to a few fixed lengths": f"{WIN}::test_on_a_gpu_each_cause_is_named_and_its_repair_wins",
    "use reduce-overhead": f"{WIN}::test_on_a_gpu_each_cause_is_named_and_its_repair_wins",
    "call it outside of no_grad and without detach": "tests/typecheck/test_cut.py::test_for_inference_and_for_a_frozen_"
    "parameter_it_is_right",
    "pass these rows through copy_to_tp": TWINS,
    "add what the ranks before have in total": TWINS,
    "where the forward leaves a replicated tensor as it is": BY_HAND,
    "count from the rank's first place": BY_HAND,
    "before the sum, put zeros where": BY_HAND,
    "if each rank holds a shard of it": "tests/typecheck/test_judged.py::test_a_forgotten_layout_is_said_to_be_"
    "forgotten",
}
"""How a sentence begins -> the test that has its program."""
NO_ADVICE = ("declared: {}",)
"""What the field says of a difference that is declared: the user's reason."""
WORDS = {"use what it returns: x = {}(x, ...)": "use what it returns", "pass src={}": "pass src=",
         "gather along dim {}": "gather along dim", "reduce it with {}": "reduce it with",
         "reduce it with op='sum', or multiply it by the number of ranks before it is used": "reduce it with op=",
         "reduce sums": "reduce it with sum"}  # fmt: skip
"""Sentences with a value in them -> the words of a repair that they hold."""


def unproven() -> set[str]:
    """Sentences without a program."""
    played = {fix.says for shown in map(example, Cause) if shown for fix in shown.fixes} | set(SUGGESTIONS.values())
    ways = {recompiles.ADVICE[way.kind][way.number] for way in WAYS}
    repairs = [repair.says for repair in (*REPAIRS, *OWN)]
    found = set()
    for file, text in sentences():
        in_typecheck = file.startswith("typecheck/") and any(says.startswith(WORDS.get(text, "\0")) or says in text
                                                             for says in repairs)  # fmt: skip
        is_known = text in played | ways or text.startswith((*ELSEWHERE, *NO_ADVICE))
        if not (in_typecheck or is_known):
            found.add(f"{file}: {text}")
    return found


def test_every_sentence_of_advice_has_a_program() -> None:
    assert unproven() == set()


def test_the_tests_that_have_their_programs_exist_and_none_is_listed_in_vain() -> None:
    texts = {text for _, text in sentences()}
    for begins, test in ELSEWHERE.items():
        file, _, name = test.partition("::")
        names = {
            node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in names, test
        assert any(text.startswith(begins) for text in texts), begins


@pytest.mark.parametrize(
    "line",
    [
        'found = Violation(fix="look at it")',
        'found = Reason(text="apart", remedy=f"config.{name}")',
        'found = changed(update={"advice": "look at it"})',
        'ADVICE = {1: ("Look at it.",)}',
        'class Wording(NamedTuple):\n    why: str\n    fix: str\nFOUND = Wording("it is wrong", "look at it")',
        'advice = "look at it"\nfound = Divergence(advice=advice if known else "")',
    ],
)
def test_advice_without_a_program_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    ((_, text),) = sentences(tmp_path)
    assert text in ("look at it", "Look at it.", "config.{}")


def test_a_new_sentence_in_the_package_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.advice.test_inventory.sentences", lambda: [("gate/checks.py", "Look at the logs.")])
    assert unproven() == {"gate/checks.py: Look at the logs."}
