"""Every name of torch that the SPMD type check needs and that is private or moves; seen on torch 2.11.0 and 2.13.0.

    name                                     why
    TorchDispatchMode                        sees every op that a program runs in eager
      .ignore_compile_internals              True lets Dynamo compile below a mode of ours; seen on 2.13.0 only
    AsyncCollectiveTensor                    what plain functional collectives return in eager
    FakeStore (testing._internal)            a group of N ranks of which only one exists
    _device_constructors (_device)           functions that take a device and make a tensor
    tree_flatten, tree_unflatten (_pytree)   inputs and outputs of any nesting -> their tensors
    Tensor._base                             the tensor that a view is of
    Tensor._backward_hooks,                  whether code of the user's gets the tensor's gradient
      ._post_accumulate_grad_hooks
    ScriptObject.op                          the reduction of an in-place c10d op
    autograd._get_sequence_nr,               an op of a backward pass -> the forward op whose gradient it makes
      _C._current_autograd_node
    DTensor._local_tensor                    the part of a DTensor that this rank holds, as its ops are given it

tests/torch_api/test_dispatch.py says which of them torch moved; all of tests/typecheck fails then.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
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


_REDUCE_OPS = {int(getattr(dist.ReduceOp, name.upper())): name for name in ("sum", "avg", "product", "max", "min")}


def reduce_op_name(op: Any) -> str:
    """`sum`, `avg`, `product`, `max` or `min` of the op that an in-place c10d op is given; empty for any other."""
    return _REDUCE_OPS.get(int(op.op()), "")
