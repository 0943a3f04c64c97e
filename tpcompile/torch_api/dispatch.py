"""Every name of torch that the SPMD type check needs and that is private or moves; seen on torch 2.11.0 and 2.13.0.

    name                                     why
    TorchDispatchMode                        sees every op that a program runs in eager
      .ignore_compile_internals              True lets Dynamo compile below a mode of ours; seen on 2.13.0 only
    AsyncCollectiveTensor                    what plain functional collectives return in eager
    FakeStore (testing._internal)            a group of N ranks of which only one exists
    _device_constructors (_device)           functions that take a device and make a tensor
    torch._C._set_grad_enabled               what no_grad calls: a mode of torch functions sees it
    tree_flatten, tree_unflatten (_pytree)   inputs and outputs of any nesting -> their tensors
    Tensor._base                             the tensor that a view is of
    Tensor._backward_hooks,                  whether code of the user's gets the tensor's gradient
      ._post_accumulate_grad_hooks
    ScriptObject.op                          the reduction of an in-place c10d op
    autograd._get_sequence_nr,               an op of a backward pass -> the forward op whose gradient it makes
      _C._current_autograd_node
    autograd.function._SingleLevelFunction   what `Function.apply` calls, also where a program kept `apply` by a name
    DTensor._local_tensor                    the part of a DTensor that this rank holds, as its ops are given it

tests/torch_api/test_dispatch.py says which of them torch moved; all of tests/typecheck fails then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._device import _device_constructors as device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "AsyncCollectiveTensor",
    "FakeStore",
    "TorchDispatchMode",
    "around_functions",
    "backward_number",
    "base_of",
    "device_constructors",
    "forward_number",
    "has_gradient_hook",
    "local_part",
    "reduce_op_name",
    "tree_flatten",
    "tree_unflatten",
]


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, None where it is no view."""
    return tensor._base


def has_gradient_hook(tensor: Tensor) -> bool:
    """True where a hook on the tensor gets its gradient in the backward pass, and may change it."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def forward_number() -> int:
    """Number of the autograd node that was made last, in an op below autograd: that of the op, if it has a gradient."""
    return torch.autograd._get_sequence_nr() - 1


def backward_number() -> int | None:
    """Number of the autograd node that runs; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def local_part(tensor: Any) -> Any:
    """The part of a DTensor on this rank; any other value as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


SET_GRAD_ENABLED: Callable[[bool], None] = torch._C._set_grad_enabled
_NAMES = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_REDUCE_OPS = {int(getattr(dist.ReduceOp, name.upper())): name for name in _NAMES}


def reduce_op_name(op: Any) -> str:
    """Name of the reduction that an in-place c10d op is given, in lower case as compiled graphs have it."""
    return _REDUCE_OPS.get(int(op.op()), "")


Around = Callable[[Any, tuple[Any, ...], Callable[[], Any]], Any]
"""Class, arguments, and what applies it -> what the program gets."""


@contextmanager
def around_functions(around: Around) -> Iterator[None]:
    """Call `around` for every autograd.Function that is applied in this context."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super(_SingleLevelFunction, cls).apply
        return around(cls, args, partial(plain, *args, **kwargs))

    before = vars(_SingleLevelFunction).get("apply")
    _SingleLevelFunction.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del _SingleLevelFunction.apply
        else:
            _SingleLevelFunction.apply = before
