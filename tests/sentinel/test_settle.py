"""What of a verdict ends the job."""

from __future__ import annotations

import pytest

from tests.evidence.samples import call, kernel, lowered, record
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import agree_rules, conclude, fetch_from
from tpcompile.evidence.records import Check, CheckId, Divergence, DivergenceClass, Layer, RankGroup, Status, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.settle import Kernels, is_grave


def verdict(*found: Divergence, problem: CheckId | None = None) -> Verdict:
    layers = dict.fromkeys(layer for d in found for layer in (d.layer, *d.consequences))
    red = {"mode": "", "status": Status.FAIL, "expected": "", "observed": ""}
    checks = [Check.model_validate({**red, "id": CheckId.LAYER, "layer": layer}) for layer in layers]
    checks += [Check.model_validate({**red, "id": problem})] if problem else []
    return Verdict(status=Status.FAIL, exit_code=1, world_size=2, summary="", checks=tuple(checks), divergences=found)


def difference(
    layer: Layer, cause: Cause = Cause.UNKNOWN, cls: DivergenceClass = DivergenceClass.CONTENT
) -> Divergence:
    groups = (RankGroup(ranks=(0,)), RankGroup(ranks=(1,)))
    return Divergence(layer=layer, cls=cls, domain="tp 0-1", where="", groups=groups, title="", cause=cause)


CHOSEN = difference(Layer.KERNELS, Cause.AUTOTUNE)


@pytest.mark.parametrize(("kernels", "grave"), [("warn", False), ("stop", True)])
def test_kernels_chosen_by_timing_end_the_job_when_asked(kernels: Kernels, grave: bool) -> None:
    assert is_grave(verdict(CHOSEN), kernels=kernels) == grave


@pytest.mark.parametrize(
    "found",
    [
        difference(Layer.KERNELS, Cause.COMPILER_PASS),
        difference(Layer.KERNELS, Cause.AUTOTUNE, DivergenceClass.COLLECTIVES),
        difference(Layer.GRAPH, Cause.RANK_CONSTANT),
    ],
)
def test_every_other_difference_ends_the_job(found: Divergence) -> None:
    assert is_grave(verdict(found), kernels="warn")
    assert is_grave(verdict(CHOSEN, found), kernels="warn")


def test_an_environment_that_differs_does_not_end_a_job_whose_programs_agree() -> None:
    assert not is_grave(verdict(difference(Layer.ENVIRONMENT, Cause.ENVIRONMENT)), kernels="warn")


def test_a_problem_ends_the_job_whatever_the_kernels_are() -> None:
    assert is_grave(verdict(CHOSEN, problem=CheckId.MOVING), kernels="warn")


def test_a_padded_matmul_ends_no_job_although_the_code_made_from_it_differs_too() -> None:
    pad = call("torch.ops.aten.constant_pad_nd.default", "%0", "[0, 1, 0, 0]")
    padded = lowered(pad, call("torch.ops.aten.mm", "%1"), kernels=(kernel("extern_kernels.mm(a, b)"),))
    plain = lowered(call("torch.ops.aten.mm", "%0"), kernels=(kernel("extern_kernels.mm(a, c)"),))
    records = [record(0, padded), record(1, plain)]
    digests = [digest_rank(one) for one in records]
    found = conclude(agree_rules(timeout_s=1.0), digests, fetch_from(records), world_size=2)
    assert [check.layer for check in found.checks if check.is_red] == [Layer.LOWERED, Layer.KERNELS]
    assert is_grave(found, kernels="stop")
    assert not is_grave(found, kernels="warn")


def test_a_choice_does_not_explain_a_difference_with_the_same_consequences() -> None:
    chosen = difference(Layer.LOWERED, Cause.AUTOTUNE).model_copy(update={"consequences": (Layer.KERNELS,)})
    assert not is_grave(verdict(chosen), kernels="warn")
    assert is_grave(verdict(chosen, difference(Layer.KERNELS, Cause.COMPILER_PASS)), kernels="warn")
