"""Every name of torch that the SPMD type check needs and that is private or moves; seen on torch 2.11.0 and 2.13.0.

    name                                     why
    TorchDispatchMode                        sees every op that a program runs in eager
    AsyncCollectiveTensor                    what plain functional collectives return in eager
    FakeStore (testing._internal)            a group of N ranks of which only one exists
    tree_flatten, tree_unflatten (_pytree)   inputs and outputs of any nesting -> their tensors

All of tests/typecheck fails when torch moves one of them.
"""

from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["AsyncCollectiveTensor", "FakeStore", "TorchDispatchMode", "tree_flatten", "tree_unflatten"]
