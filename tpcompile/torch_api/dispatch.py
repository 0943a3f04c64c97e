"""Every name of torch that the SPMD type check needs and that is private or moves; seen on torch 2.11.0 and 2.13.0.

    name                                     why
    TorchDispatchMode                        sees every op that a program runs in eager
      .ignore_compile_internals              True lets Dynamo compile below a mode of ours; seen on 2.13.0 only
    AsyncCollectiveTensor                    what plain functional collectives return in eager
    FakeStore (testing._internal)            a group of N ranks of which only one exists
    tree_flatten, tree_unflatten (_pytree)   inputs and outputs of any nesting -> their tensors
    Tensor._base                             the tensor that a view is of
    Tensor._backward_hooks,                  whether code of the user's gets the tensor's gradient
      ._post_accumulate_grad_hooks
    ScriptObject.op                          the reduction of an in-place c10d op

tests/torch_api/test_dispatch.py says which of them torch moved; all of tests/typecheck fails then.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "AsyncCollectiveTensor",
    "FakeStore",
    "TorchDispatchMode",
    "base_of",
    "has_gradient_hook",
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


_REDUCE_OPS = {int(getattr(dist.ReduceOp, name.upper())): name for name in ("sum", "avg", "product", "max", "min")}


def reduce_op_name(op: Any) -> str:
    """`sum`, `avg`, `product`, `max` or `min` of the op that an in-place c10d op is given; empty for any other."""
    return _REDUCE_OPS.get(int(op.op()), "")
