"""What the SPMD type check takes from torch: a mode that sees eager ops, trees, fake groups, the base of a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpcompile.torch_api import dispatch


class _Names(dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name)
        return func(*args, **kwargs or {})


def test_a_dispatch_mode_sees_the_ops_of_eager_code() -> None:
    with _Names() as names:
        torch.ones(2) + 1
    assert "aten::add" in names.seen


def test_a_mode_of_torch_functions_sees_where_gradients_are_switched_off() -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append((func, *args))
            return func(*args, **kwargs or {})

    calls: list[tuple[Any, ...]] = []
    with Seen(), torch.no_grad():
        pass
    assert calls == [(dispatch.SET_GRAD_ENABLED, False), (dispatch.SET_GRAD_ENABLED, True)]


def test_a_tree_of_any_nesting_is_flattened_and_put_together_again() -> None:
    tree = {"a": [torch.ones(1), 2], "b": (None,)}
    leaves, spec = dispatch.tree_flatten(tree)
    assert leaves[1:] == [2, None]
    assert dispatch.tree_unflatten(leaves, spec) == tree


def test_the_base_of_a_view_is_the_tensor_it_views() -> None:
    x = torch.ones(4)
    assert dispatch.base_of(x[:2]) is x
    assert dispatch.base_of(x) is None


def test_hooks_on_a_gradient_are_seen() -> None:
    plain, hooked, accumulated = (torch.ones(2, requires_grad=True) for _ in range(3))
    hooked.register_hook(lambda grad: 2 * grad)
    accumulated.register_post_accumulate_grad_hook(lambda tensor: None)
    assert [dispatch.has_gradient_hook(tensor) for tensor in (plain, hooked, accumulated)] == [False, True, True]


def test_a_functional_collective_on_one_fake_rank_of_two_returns_an_async_tensor() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=dispatch.FakeStore())
    try:
        reduced = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        is_async = isinstance(reduced, dispatch.AsyncCollectiveTensor)
        funcol.wait_tensor(reduced)
    finally:
        dist.destroy_process_group()
    assert is_async


def test_the_reduction_of_an_in_place_collective_is_named() -> None:
    class Ops(_Names):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == "c10d::allreduce_":
                self.seen.append(dispatch.reduce_op_name(args[2]))
            return func(*args, **kwargs or {})

    dist.init_process_group("fake", rank=0, world_size=2, store=dispatch.FakeStore())
    try:
        with Ops() as ops:
            for op in ("SUM", "AVG", "PRODUCT", "MAX", "MIN", "BAND"):
                dist.all_reduce(torch.ones(2), op=getattr(dist.ReduceOp, op))
    finally:
        dist.destroy_process_group()
    assert ops.seen == ["sum", "avg", "product", "max", "min", "band"]


class _Numbers(dispatch.TorchDispatchMode):
    """Numbers of forward and backward by op."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: dict[str, int] = {}
        self.backward: list[int | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = dispatch.backward_number()
        if number is None:
            self.forward.setdefault(func._schema.name, dispatch.forward_number())
        self.backward.append(number)
        return func(*args, **kwargs or {})


def test_an_op_of_a_backward_pass_has_the_number_of_its_forward_op() -> None:
    x = torch.ones(3, requires_grad=True)
    with _Numbers() as numbers:
        x.exp().cos().sum().backward()
    order = [numbers.forward[name] for name in ("aten::exp", "aten::cos", "aten::sum")]
    assert order == sorted(set(order))
    assert set(order) <= set(numbers.backward)
    assert dispatch.backward_number() is None


def test_a_plain_tensor_is_its_own_local_part() -> None:
    x = torch.ones(2)
    assert dispatch.local_part(x) is x


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
    with dispatch.around_functions(around):
        y = kept(kept(x))
    kept(x)
    y.sum().backward()
    assert seen == [("Double", 1), ("Double", 1)]
    assert torch.equal(y, torch.full((3,), 4.0)) and x.grad is not None and torch.equal(x.grad, torch.full((3,), 4.0))
