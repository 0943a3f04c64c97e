"""What a target returned in its runs: gradients too, compared, and said where only some of the runs have them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpcompile.gate.outputs import errors, forget_gradients, kept
from tpcompile.numerics import error_ratio


def runs(**changed: Any) -> dict[str, dict[str, Tensor]]:
    """Four runs of a step that returns an output and a gradient; a keyword is what one of them returns instead."""
    torch.manual_seed(0)
    exact = torch.randn(8, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    rounded = tuple(tensor.float() for tensor in exact)
    results = {"compiled": rounded, "eager": rounded, "single": rounded, "exact": exact} | changed
    return {name: kept(result) for name, result in results.items()}


def test_a_gradient_is_compared_as_any_output() -> None:
    assert all(one["ratio"] <= 2.5 for one in errors(**runs()).values())
    wrong = runs()["compiled"] | {"forward.1": torch.randn(16)}
    found = errors(**runs() | {"compiled": wrong})
    assert {name for name, one in found.items() if not one["ratio"] <= 2.5} == {
        "forward.1",
        "eager forward.1",
    }


@pytest.mark.parametrize("where", ["compiled", "eager", "single", "exact"])
def test_a_gradient_that_one_run_has_not_is_said(where: str) -> None:
    found = errors(**runs(**{where: (torch.zeros(8, 16), None)}))
    worst = found["eager forward.1" if where == "eager" else "forward.1"]
    assert not worst["ratio"] <= 2.5
    assert worst["says"].count("None") == 1 and "[16]" in worst["says"]


def test_a_gradient_of_a_shard_has_a_different_shape_and_that_is_said() -> None:
    found = errors(**runs(compiled=(torch.zeros(8, 16), torch.zeros(8))))
    assert re.findall(r"\[\d+\]", found["forward.1"]["says"]) == ["[8]", "[16]", "[16]"]


def test_inputs_in_float64_require_the_gradients_that_the_given_ones_do() -> None:
    x, ids, mask = torch.randn(4, requires_grad=True), torch.arange(4), torch.randn(4)
    cast_x, cast_ids, cast_mask = error_ratio.cast((x, ids, mask), torch.float64)
    assert (cast_x.requires_grad, cast_x.is_leaf, cast_mask.requires_grad) == (True, True, False)
    assert cast_ids is ids
    (cast_x * 2).sum().backward()
    assert torch.equal(cast_x.grad, torch.full((4,), 2.0, dtype=torch.float64)) and x.grad is None


def test_what_is_kept_does_not_change_with_the_next_call() -> None:
    module, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    module(x).sum().backward()
    first = kept((x.grad, module.weight.grad))
    module(x).sum().backward()
    second = kept((x.grad, module.weight.grad))
    assert all(torch.equal(second[name], 2 * first[name]) for name in ("forward", "forward.1"))
    forget_gradients(module, (x, torch.arange(2)))
    assert x.grad is None and module.weight.grad is None
