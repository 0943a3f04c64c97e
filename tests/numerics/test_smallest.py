"""Compiled code beside its eager values: the fewest nodes that are wrong, and no alarm for what rounding explains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.lowering import lowerings

from tpcompile.numerics.beside_eager import Comparison, is_wrong
from tpcompile.numerics.smallest import Part, Search
from tpcompile.torch_api import comparing

aten = torch.ops.aten


def compared(program: Callable[..., Tensor], *inputs: Tensor) -> Comparison:
    """Graphs of Inductor that are wrong in a call, with the backward of its sum."""
    found = Comparison()
    torch.compiler.reset()
    with comparing.inductor_graphs(found.on_run):
        torch.compile(program)(*inputs).sum().backward()
    return found


def smallest(found: Comparison) -> list[Part]:
    parts = (Search(wrong, timeout_s=60).smallest() for wrong in found.wrong)
    return [part for part in parts if part is not None]


def program(x: Tensor) -> Tensor:
    return torch.sin(x @ x).relu() @ x


def test_the_wrong_op_alone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    cosine: Any = lowerings[aten.cos.default]
    monkeypatch.setitem(lowerings, aten.sin.default, lambda x: cosine(x))
    (part,) = smallest(compared(program, torch.randn(8, 8, requires_grad=True)))
    assert [str(node.target) for node in part.nodes] == ["aten.sin.default"]


def test_right_code_has_no_wrong_graph() -> None:
    assert compared(program, torch.randn(8, 8, requires_grad=True)).wrong == []


def test_noise_around_a_gradient_that_is_zero_is_no_error() -> None:
    def one(x: Tensor) -> Tensor:
        return torch.softmax(x * 3, -1)  # sums to a constant

    assert smallest(compared(one, torch.randn(8, 16, requires_grad=True))) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_in_a_different_order_is_right_and_a_shifted_one_is_not(dtype: torch.dtype) -> None:
    x = torch.randn(64, 4096).to(dtype)
    forward, backward = x.sum(-1), x.flip(-1).float().sum(-1).to(dtype)
    assert not is_wrong(backward, forward)
    assert is_wrong(x[:, 1:].mul(1.2).sum(-1), forward)
    assert is_wrong(forward * float("nan"), forward)


def without_unused_calls(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A backend that takes out what nothing uses, also what writes in place."""
    for node in reversed(module.graph.nodes):
        if node.op in ("call_function", "call_method") and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return module.forward


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        top = x.abs().amax()
        self.scale.copy_(top / 15)
        return (x / self.scale).round() * self.scale


def test_a_write_that_is_lost_is_named_and_not_what_reads_the_old_value() -> None:
    found = Comparison(of_dynamo=True)
    torch.compiler.reset()
    with comparing.dynamo_graphs(found.on_run), torch.no_grad():
        torch.compile(Scaled(), backend=without_unused_calls)(torch.randn(8, 8))
    (part,) = smallest(found)
    assert [node.target for node in part.nodes] == ["copy_"]


@torch.library.custom_op("tests_smallest::write", mutates_args=())
def write(cache: Tensor, x: Tensor) -> None:
    """Does not say that it writes."""
    cache.copy_(x)


@write.register_fake
def _(cache: Tensor, x: Tensor) -> None:
    pass


def test_a_write_that_an_op_does_not_declare_is_named_too() -> None:
    def cached(cache: Tensor, x: Tensor) -> Tensor:
        write(cache, x.sin())
        return torch.softmax(x @ cache, -1)

    found = Comparison(of_dynamo=True)
    torch.compiler.reset()
    with comparing.dynamo_graphs(found.on_run), torch.no_grad():
        torch.compile(cached, backend="aot_eager")(torch.zeros(8, 8), torch.randn(8, 8))
    (part,) = smallest(found)
    assert ["write" in str(node.target) for node in part.nodes] == [True]
