"""autograd.Functions are seen as they are applied, also by an `apply` that was kept, until the context ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpcompile.torch_api.functions import around_functions


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


def test_each_function_is_seen_with_its_arguments_and_applied_once() -> None:
    kept: Callable[[Tensor], Tensor] = Double.apply  # type: ignore[assignment]  # torch has no types for it
    seen: list[tuple[str, int]] = []

    def around(cls: Any, args: tuple[Any, ...], apply: Callable[[], Any]) -> Any:
        seen.append((cls.__name__, len(args)))
        return apply()

    x = torch.ones(3, requires_grad=True)
    with around_functions(around):
        y = kept(kept(x))
    kept(x)
    y.sum().backward()
    assert seen == [("Double", 1), ("Double", 1)]
    assert torch.equal(y, torch.full((3,), 4.0)) and x.grad is not None and torch.equal(x.grad, torch.full((3,), 4.0))
