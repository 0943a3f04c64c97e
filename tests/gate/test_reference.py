"""Errors against float64, and the module in which wrong numbers begin; one device, no ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tpcompile import config
from tpcompile.collectives.strategies import Collectives
from tpcompile.gate import reference as single_device
from tpcompile.gate.reference import Result, StackReference
from tpcompile.nn.block import TransformerStack
from tpcompile.numerics.localise import first_wrong, module_outputs

BLOCK = config.load("cpu_smoke", ["block.num_layers=2"]).block
CPU = torch.device("cpu")
LIMIT = 2.5


@pytest.fixture(scope="module")
def reference() -> StackReference:
    return StackReference(BLOCK, seed=0, device=CPU, train=True)


@pytest.fixture
def stack(reference: StackReference) -> TransformerStack:
    return single_device.build(BLOCK, Collectives(None), reference.full, CPU)


def run(reference: StackReference, stack: nn.Module) -> Result:
    """One forward and backward in the dtype under test."""
    return single_device.call_once(reference, stack, stack, reference.inputs())


def first_wrong_module(reference: StackReference, stack: nn.Module) -> str:
    module, _op = reference.first_wrong(stack, Collectives(None), limit=LIMIT)
    return module


def double(stack: nn.Module, name: str) -> None:
    """Make one module's weight twice what it should be."""
    with torch.no_grad():
        stack.get_submodule(name).weight.mul_(2)


def test_right_stack_is_within_the_single_device_error(reference: StackReference, stack: TransformerStack) -> None:
    found = reference.errors(stack, run(reference, stack))
    assert found.keys() == {"forward", "grad input", *(f"grad {name}" for name, _ in stack.named_parameters())}
    assert all(value["ratio"] <= LIMIT for value in found.values())


@pytest.mark.parametrize("name", ["layers.0.attention_norm", "layers.0.attention.wo", "layers.1.mlp.down"])
def test_wrong_module_is_the_first_one_named(reference: StackReference, stack: TransformerStack, name: str) -> None:
    double(stack, name)
    assert reference.errors(stack, run(reference, stack))["forward"]["ratio"] > 1e3
    assert first_wrong_module(reference, stack) == name


def test_right_stack_has_no_wrong_module(reference: StackReference, stack: TransformerStack) -> None:
    assert first_wrong_module(reference, stack) == ""


def test_wrong_gradient_under_a_right_forward_is_seen(reference: StackReference, stack: TransformerStack) -> None:
    result = run(reference, stack)
    result.grads["layers.0.attention.wo.weight"].mul_(2)
    found = reference.errors(stack, result)
    assert [name for name, value in found.items() if value["ratio"] > LIMIT] == ["grad layers.0.attention.wo.weight"]


def test_missing_gradient_is_infinitely_wrong(reference: StackReference, stack: TransformerStack) -> None:
    result = run(reference, stack)
    del result.grads["layers.0.attention.wo.bias"]
    assert reference.errors(stack, result)["grad layers.0.attention.wo.bias"]["ratio"] == math.inf


def test_output_that_is_not_a_number_is_wrong(reference: StackReference, stack: TransformerStack) -> None:
    with torch.no_grad():
        stack.get_submodule("layers.1.mlp.down").weight.fill_(math.nan)
    assert not reference.errors(stack, run(reference, stack))["forward"]["ratio"] <= LIMIT
    assert first_wrong_module(reference, stack) == "layers.1.mlp.down"


def test_two_equal_runs_are_not_apart(reference: StackReference, stack: TransformerStack) -> None:
    one, two = run(reference, stack), run(reference, stack)
    assert {value["error"] for value in reference.difference(stack, one, two).values()} == {0.0}
    two.output.mul_(1.001)
    apart = reference.difference(stack, one, two)
    assert [name for name, value in apart.items() if value["ratio"] > LIMIT] == ["forward"]


class Halves(nn.Module):
    """A column-parallel layer in front of a row-parallel one."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.column, self.row = nn.Linear(4, len(first), bias=False), nn.Linear(len(first), 4, bias=False)
        with torch.no_grad():
            self.column.weight.copy_(first)
            self.row.weight.copy_(second)

    def forward(self, x: Tensor) -> Tensor:
        return self.row(self.column(x))


@pytest.mark.parametrize(("rank", "name"), [(1, "row"), (0, "column")])
def test_sharded_output_is_compared_with_the_slice_of_its_rank(rank: int, name: str) -> None:
    torch.manual_seed(0)
    first, second, x = torch.randn(4, 4), torch.randn(4, 4), torch.randn(3, 4)
    full = module_outputs(Halves(first, second), (x,))
    exact = module_outputs(Halves(first, second).double(), (x.double(),))
    shard = module_outputs(Halves(first[2:], second[:, 2:]), (x,))  # the half of rank 1, its sum not yet reduced
    assert first_wrong(shard, full, exact, rank=rank, limit=LIMIT) == name
