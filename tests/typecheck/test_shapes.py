"""Parameters whose layout no module declares: their shapes on one rank say it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tpcompile.typecheck.parameters import types_of_parameters
from tpcompile.typecheck.targets import check_target

MODULES = "tests.typecheck.plain_modules"


def test_a_right_module_is_judged_whole() -> None:
    report = check_target(f"{MODULES}:right")
    assert report.finding is None and report.is_complete


def test_what_is_wrong_is_found_though_nothing_is_declared() -> None:
    finding = check_target(f"{MODULES}:early_bias").finding
    assert finding is not None
    assert (finding.rule, finding.site.line) == ("bias-before-reduce", 38)


def test_without_the_shapes_of_one_rank_only_that_is_said() -> None:
    """The negative control: a target that can be built for several ranks only."""
    finding = check_target(f"{MODULES}:early_bias_for_several_ranks").finding
    assert finding is not None and finding.rule == "undeclared-layout"


def test_a_parameter_with_a_hook_on_its_gradient_is_no_finding() -> None:
    report = check_target(f"{MODULES}:hooked")
    assert report.finding is None and "hook" in report.not_followed_since


@pytest.mark.parametrize(
    ("full", "kind"),
    [((16, 8), "V(0)"), ((4, 32), "V(1)"), ((14, 8), "V(0)"), ((4, 8), "I"), ((8, 32), ""), ((5, 8), ""), ((4,), "")],
)
def test_the_dim_in_which_the_shapes_differ_is_sharded(full: tuple[int, ...], kind: str) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4, 8))
    ((_, type_),) = types_of_parameters(module, {}, tp=4, full={"weight": full})
    assert (str(type_), type_.undeclared) == ((kind, "") if kind else ("I", "weight"))
