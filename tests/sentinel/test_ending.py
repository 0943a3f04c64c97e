"""What of a verdict ends the job."""

from __future__ import annotations

import pytest

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import Check, Divergence, DivergenceClass, Layer, RankGroup, Status, Verdict
from tpcompile.sentinel.ending import Kernels, is_grave


def verdict(*found: Divergence, problem: str = "") -> Verdict:
    names = [*(f"{d.layer} equal on all ranks" for d in found), *([problem] if problem else [])]
    checks = tuple(Check(name=n, mode="", status=Status.FAIL, expected="", observed="") for n in dict.fromkeys(names))
    return Verdict(status=Status.FAIL, exit_code=1, world_size=2, summary="", checks=checks, divergences=found)


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
    assert is_grave(verdict(CHOSEN, problem="no rank is stuck"), kernels="warn")
