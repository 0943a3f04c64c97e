"""A parameter whose value is used, and that no gradient gets to, is found at the op in which its gradient is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.typecheck.test_fast_paths import checked
from tpcompile.collectives.strategies import Collectives
from tpcompile.fastpath import plain
from tpcompile.layout import ShardSpec
from tpcompile.typecheck import Report, check_types

X = torch.zeros(2, 3, 8)
Step = Callable[["Scaled", Tensor], Tensor]


class Scaled(nn.Module):
    """A replicated scale of which a step makes use."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.other = nn.Parameter(torch.ones(8))
        self.step = step

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"scale": ShardSpec(), "other": ShardSpec()}

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x) * self.other


def report_of(step: Step, *, train: bool = True, frozen: bool = False) -> Report:
    def build(_comm: Collectives) -> nn.Module:
        module = Scaled(step)
        module.scale.requires_grad_(not frozen)
        return module

    return check_types(build, (X,), tp=2, input_types=("I",), train=train)


def under_no_grad(module: Scaled, x: Tensor) -> Tensor:
    with torch.no_grad():
        scaled = x * module.scale  # here
    return scaled + x


def detached(module: Scaled, x: Tensor) -> Tensor:
    return x * module.scale.detach()  # here


def of_data(module: Scaled, x: Tensor) -> Tensor:
    with torch.no_grad():
        kept = module.scale.clone()  # here
    return x * kept


def packed(module: Scaled, x: Tensor) -> Tensor:
    scale = module.scale.detach()  # here
    return x * torch.cat((scale, module.other))[:8]


def scattered(module: Scaled, x: Tensor) -> Tensor:
    with torch.no_grad():
        part = funcol.reduce_scatter_tensor(module.scale, "sum", 0, dist.group.WORLD)  # here
    return x * part.repeat(2)


@pytest.mark.parametrize("step", [under_no_grad, detached, of_data, packed, scattered])
def test_the_op_that_loses_a_gradient_is_found(step: Step) -> None:
    finding = report_of(step).finding
    assert finding is not None and finding.rule == "gradient-cut"
    assert "scale" in finding.why and "# here" in finding.site.source


def logged(module: Scaled, x: Tensor) -> Tensor:
    with torch.no_grad():
        float(module.scale.sum())
    return x * module.scale


def straight_through(module: Scaled, x: Tensor) -> Tensor:
    return x * (module.scale + (module.scale.round() - module.scale).detach())


def place_of_the_largest(module: Scaled, x: Tensor) -> Tensor:
    return x * module.scale + module.scale.detach().argmax()


def place_packed_with_the_largest(module: Scaled, x: Tensor) -> Tensor:
    value, place = module.scale.detach().max(-1)
    return x + torch.stack((value, place.to(x.dtype)))[1]


@pytest.mark.parametrize("step", [logged, straight_through, place_of_the_largest, place_packed_with_the_largest])
def test_a_parameter_that_gets_a_gradient_otherwise_is_none(step: Step) -> None:
    assert report_of(step).finding is None


@pytest.mark.parametrize("options", [{"train": False}, {"frozen": True}])
def test_for_inference_and_for_a_frozen_parameter_it_is_right(options: dict[str, bool]) -> None:
    assert report_of(under_no_grad, **options).finding is None


def test_a_fast_path_that_is_called_under_no_grad_is_found_in_a_block() -> None:
    def under(*args: Any, **options: Any) -> Any:
        with torch.no_grad():
            return plain.qk_norm_rope(*args, **options)  # here

    def spoil(block: Any) -> None:
        block.attention.fast_path = under

    report = checked("wan", "full", spoil)
    cuts = [found for found in report.violations if found.rule == "gradient-cut"]
    named = " ".join(found.why for found in cuts)
    assert "q_norm.weight" in named and "k_norm.weight" in named, str(report)
    assert all(found.site.line for found in cuts)
