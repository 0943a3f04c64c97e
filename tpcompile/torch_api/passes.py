"""What passes over Inductor's graphs need of torch and that is private or moves; seen on torch 2.11.0 and 2.13.0.

    name                                    why
    custom_graph_pass.CustomGraphPass       a pass with an identity, which Inductor's caches make part of their keys
    custom_graph_pass.get_hash_for_files    of the pass itself: a cache outlives a release
    config.post_grad_custom_post_pass       the graph behind AOTAutograd, functional, before Inductor works in place
    _ops.OpOverload                         the target of a node that calls an op
    tree_leaves (_pytree)                   the values of nested arguments

`tests/torch_api/test_passes.py` fails when one of the names moves. The passes themselves are in the packages that run
them: tpcompile.by_size and tpcompile.fusion.
"""

from typing import Any, Self

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

__all__ = ["AFTER_AUTOGRAD", "CustomGraphPass", "OpOverload", "SharedPass", "get_hash_for_files", "tree_leaves"]

AFTER_AUTOGRAD = "post_grad_custom_post_pass"
"""The option of torch.compile that takes a pass over each graph behind AOTAutograd."""


class SharedPass(CustomGraphPass):
    """A pass of which there is one: torch.compile copies its settings."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
