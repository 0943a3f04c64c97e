"""`check_setup`, `Handshake.recheck` and `InputCheck` on two real gloo ranks: green when equal, else key and rank."""

from __future__ import annotations

import re
from functools import cache
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tests.preflight import job
from tpcompile.evidence.records import Check, CheckId, Divergence, DivergenceClass, Layer, Status, Verdict
from tpcompile.evidence.records.causes import ADVICE, Cause
from tpcompile.preflight import fact_judge, inputs
from tpcompile.preflight.facts import ENV, SHARDS
from tpcompile.report.terminal import render
from tpcompile.testing import run_on_ranks


@cache
def results() -> list[dict[str, Any]]:
    """The verdicts of both ranks in all scenarios."""
    return run_on_ranks(job.run, timeout_s=150)


def verdict(scenario: str, part: str = "") -> Verdict:
    """The verdict of a scenario, which both ranks must hold alike."""
    texts = [found[scenario][part] if part else found[scenario] for found in results()]
    assert texts[0] == texts[1]
    return Verdict.model_validate_json(texts[0])


def red(scenario: str, part: str = "") -> Divergence:
    """The first red difference."""
    found = verdict(scenario, part)
    assert (found.status, found.exit_code) == (Status.FAIL, 1)
    return next(d for d in found.divergences if d.is_red)


def check(found: Verdict, name: str) -> Check:
    """The check of that name."""
    return next(c for c in found.checks if c.name == name)


def test_equal_ranks_pass_whatever_their_host_process_hash_seed_and_cache_places() -> None:
    found = verdict("clean")
    assert (found.status, found.divergences) == (Status.PASS, ())
    assert {"host", "process id", "env PYTHONHASHSEED", "env TORCHINDUCTOR_CACHE_DIR", "env LOCAL_RANK"} <= set(
        check(found, "normalised").observed.split(", ")
    )
    assert found.domains == {"tp 0-1": ((0, 1),)}


def test_every_group_of_facts_holds_something_in_a_clean_run() -> None:
    equal = [c for c in verdict("clean").checks if c.name.endswith("on all ranks")]
    empty = {c.name for c in equal if c.observed.endswith(": 0")}
    # Nobody need set a variable or a compiler setting here.
    optional = {"environment variables equal on all ranks", "compiler settings equal on all ranks"}
    assert len(equal) == 9 and empty <= optional


@pytest.mark.parametrize(
    ("scenario", "layer", "title"),
    [
        ("version", Layer.ENVIRONMENT, "version torch: '9.9' on rank 1, '2."),
        ("variable", Layer.ENVIRONMENT, "env TORCHINDUCTOR_MAX_AUTOTUNE: '1' on rank 1, unset on rank 0"),
        ("setting", Layer.ENVIRONMENT, "config _inductor.config.epilogue_fusion: 'False' on rank 1, unset on rank 0"),
        ("precision", Layer.ENVIRONMENT, "backend float32_matmul_precision: 'high' on rank 1, 'highest' on rank 0"),
        ("attention", Layer.ENVIRONMENT, "'MATH' on rank 1, 'FLASH_ATTENTION' on rank 0"),
        ("named_backend", Layer.ENVIRONMENT, "backend attention: 'math' on rank 1, 'flash' on rank 0"),
        ("failing_resolver", Layer.ENVIRONMENT, "'raised ImportError: no module named flash_attn' on rank 1, 'flash'"),
        ("autocast", Layer.ENVIRONMENT, "autocast cpu: 'torch.bfloat16' on rank 1, 'off' on rank 0"),
        ("topology", Layer.ENVIRONMENT, "topology mesh ranks: '[1, 0]' on rank 1, '[0, 1]' on rank 0"),
        ("parameter_dtype", Layer.ENVIRONMENT, "dtype of frequencies: 'bfloat16' on rank 1, 'float64' on rank 0"),
        ("dtensor_on_one_rank", Layer.ENVIRONMENT, "dtype of norm: 'float32 with gradient, DTensor' on rank 1, 'float"),
        ("missing_parameter", Layer.ENVIRONMENT, "dtype of bias: 'float32 with gradient' on rank 1, missing on rank"),
        ("replicated_bit", Layer.INPUTS, "weight norm: first difference at [13, 7]: 137.0 on rank 0, 137.0000152587"),
        ("replicated_buffer", Layer.INPUTS, "weight frequencies: first difference at [0]: 0.0 on rank 0, -0.0 on rank"),
        ("dtensor_drift", Layer.INPUTS, "weight norm: first difference at [0]: 1.0 on rank 0, 2.0 on rank 1"),
        ("uneven_undeclared", Layer.INPUTS, "shard up: 'float32[3, 3] (caller)' on rank 1, 'float32[4, 3] (caller)'"),
        ("lost_rows", Layer.INPUTS, "the shards do not tile the full shape [7, 3]"),
        ("own_module_other_size", Layer.INPUTS, "shard bias: 'float32[8] on dim 0 (shard_specs)' on rank 1"),
    ],
)
def test_a_difference_is_red_and_names_key_and_ranks(scenario: str, layer: Layer, title: str) -> None:
    found = red(scenario)
    assert title in found.title
    assert found.layer == layer
    assert verdict(scenario).summary


@pytest.mark.parametrize(
    ("as_it_is", "followed", "advice"),
    [
        (("named_backend", ""), ("clean", ""), fact_judge._BACKEND),
        (("topology", ""), ("clean", ""), fact_judge._MESH),
        (("replicated_bit", ""), ("broadcast_weight", ""), ADVICE[Cause.WEIGHTS][0]),
        (("inputs", "value"), ("inputs", "broadcast"), ADVICE[Cause.INPUT_VALUES][0]),
    ],
    ids=["backend", "mesh", "weights", "inputs"],
)
def test_the_advice_turns_red_into_green(as_it_is: tuple[str, str], followed: tuple[str, str], advice: str) -> None:
    assert red(*as_it_is).advice == advice
    assert verdict(*followed).status == Status.PASS


def test_every_advice_of_a_preflight_is_shown_to_help() -> None:
    """Above; that of a cause is in tests/advice."""
    given = {kind.advice for kind in (*fact_judge.KINDS.values(), *inputs._KINDS.values(), inputs._STEP)}
    assert given - {None, ""} == {fact_judge._BACKEND, fact_judge._MESH}


def test_a_difference_of_meshes_is_one_that_hangs() -> None:
    found = red("topology")
    assert (found.cls, found.cause) == (DivergenceClass.COLLECTIVES, Cause.GROUP)


def test_each_difference_is_reported_once_where_it_starts() -> None:
    assert {d.layer for d in verdict("parameter_dtype").divergences} == {Layer.ENVIRONMENT}
    assert len(verdict("variable").divergences) == 1


def test_an_allowed_difference_is_green_and_listed_with_its_reason() -> None:
    found = verdict("declared_variable")
    assert found.status == Status.PASS
    (declared,) = found.divergences
    assert declared.cls == DivergenceClass.DECLARED and declared.advice.startswith("declared: rank 1")


def test_a_resolver_that_raises_is_a_failed_check_of_its_rank() -> None:
    found = check(verdict("failing_resolver"), "every resolver answered")
    assert (found.status, found.ranks) == (Status.FAIL, (1,))


@pytest.mark.parametrize("scenario", ["uneven_declared", "dtensor", "own_module"])
def test_shards_that_make_up_the_full_tensor_are_green(scenario: str) -> None:
    found = verdict(scenario)
    assert (found.status, found.divergences) == (Status.PASS, ())
    (shards,) = [c for c in found.checks if c.name.startswith(SHARDS)]
    assert not shards.observed.endswith(": 0")


def test_weights_without_a_declaration_are_listed_and_not_judged() -> None:
    found = verdict("nobody_said")
    listed = check(found, "undeclared weights")
    assert (found.status, listed.status, listed.observed[:6]) == (Status.PASS, Status.INFO, "1 of 3")
    assert listed.details[0] == "weight up: 0 | 1" and "sharded=" in listed.details[1]


def test_unchanged_frozen_weights_pass_the_recheck() -> None:
    assert verdict("recheck", "first").status == verdict("recheck", "untouched").status == Status.PASS


def test_a_shard_written_on_one_rank_is_named_with_its_rank_and_step() -> None:
    found = red("recheck", "on one rank")
    assert found.title.startswith("weight up: ") and [group.ranks for group in found.groups] == [(0,), (1,)]
    assert (found.step, found.cause) == (7, Cause.WEIGHTS)


def test_weights_that_changed_on_all_ranks_are_listed_only() -> None:
    found = verdict("recheck", "on all ranks")
    assert found.status == Status.PASS
    (changed,) = [c for c in found.checks if c.name.startswith("weights changed")]
    assert changed.details == ("weight norm",)


@pytest.mark.parametrize("part", ["equal", "shard"])
def test_equal_inputs_and_shards_of_inputs_pass(part: str) -> None:
    found = verdict("inputs", part)
    assert (found.status, found.divergences) == (Status.PASS, ())


@pytest.mark.parametrize(
    ("part", "cause", "title"),
    [
        ("value", Cause.INPUT_VALUES, "input args[1] bits: first difference at [61, 3]: 0.5 on rank 0, 12203.0 on"),
        ("nan payload", Cause.INPUT_VALUES, "nan (bits 0x7fc00000) on rank 0, nan (bits 0x7fc00001) on rank 1"),
        ("stride", Cause.STRIDE, "input mask stride: '[1, 100] on cpu' on rank 1, '[200, 1] on cpu' on rank 0"),
        ("shape", Cause.SHAPE, "input args[0] shape: '[100, 200]' on rank 1, '[99, 200]' on rank 0"),
        ("dtype", Cause.DTYPE, "input args[0] dtype: 'torch.float64' on rank 1, 'torch.float32' on rank 0"),
        ("number", Cause.PYTHON_VALUE, "input batch['scale'] value: '2.5' on rank 1, '2.0' on rank 0"),
        ("gradient", Cause.REQUIRES_GRAD, "input args[0] requires_grad: 'True' on rank 1, 'False' on rank 0"),
        ("missing argument", Cause.UNKNOWN, "input extra: 'passed' on rank 1, not passed on rank 0"),
        ("step", Cause.UNKNOWN, "step: '4' on rank 1, '3' on rank 0"),
    ],
)  # fmt: skip
def test_a_different_input_is_red_and_names_argument_and_values(part: str, cause: Cause, title: str) -> None:
    found = red("inputs", part)
    assert title in found.title
    assert (found.layer, found.cause) == (Layer.INPUTS, cause)


def test_the_first_argument_that_differs_comes_first_with_its_step() -> None:
    found = verdict("inputs", "value")
    assert [d.title.split()[1] for d in found.divergences] == ["args[1]", "args[2]"]
    assert {d.step for d in found.divergences} == {5}


def test_a_rank_that_never_comes_is_a_failed_check_with_what_it_did_last() -> None:
    found = Verdict.model_validate_json(results()[0]["absent"])
    missing = check(found, CheckId.REPORTED.text)
    assert (found.exit_code, missing.ranks) == (1, (1,))
    assert re.search("rank 1 .*inputs .*ranks 0-1", found.summary)


def test_without_rank_0_the_next_rank_judges() -> None:
    found = Verdict.model_validate_json(results()[1]["absent_judge"])
    assert check(found, CheckId.REPORTED.text).ranks == (0,)
    assert re.search("rank 0 .*never", found.summary)


def test_a_rank_that_died_on_the_way_is_named_with_its_last_step() -> None:
    found = Verdict.model_validate_json(results()[0]["died_on_the_way"])
    assert re.search("rank 1 .*fingerprints", found.summary)


def test_a_judge_that_falls_silent_is_an_error_not_a_hang() -> None:
    assert re.search(r"rank 1 .*handshake .*judging rank", results()[1]["silent_judge"])


def test_a_rank_that_sends_no_details_is_still_judged_by_its_hash() -> None:
    found = Verdict.model_validate_json(results()[0]["silent_answerer"])
    assert found.exit_code == 1
    assert re.search(f"{ENV}: 'sha256:.*rank 1", found.summary)


def test_the_terminal_report_shows_key_and_advice() -> None:
    out = StringIO()
    render(verdict("variable"), Console(file=out, width=200))
    text = out.getvalue()
    (found,) = verdict("variable").divergences
    assert found.title in text and found.advice in text and "FAIL (exit 1)" in text
