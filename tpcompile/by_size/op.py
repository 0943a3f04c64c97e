"""A tensor, the rows of the table and a group -> the sum over its ranks, by the algorithm for this size.

The same bits on all ranks: torch's kernels add in the order of the ranks, for groups of 2, 4 and 8 ranks. NVLink
multicast is never used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpcompile.by_size.table import NCCL, VECTOR_BYTES, Algorithm, algorithm_for
from tpcompile.by_size.workspace import workspace_of
from tpcompile.torch_api import c10d, symmetric


@torch.library.custom_op("tpcompile::all_reduce_by_size", mutates_args=())
def all_reduce_by_size(x: Tensor, rows: str, group_name: str) -> Tensor:
    """Sum of `x` over the ranks of the group, contiguous; all of them call it with equal shapes and `rows`.

    A collective. `rows` are those of `Table.rows` for this GPU and number of ranks. On a CPU the functional all-reduce
    sums every size. Raises ConfigError where the workspace would have to grow while a CUDA graph is captured.
    """
    num_ranks = c10d.group_of_name(group_name).size()
    algorithm = chosen(x, rows, num_ranks)
    if algorithm == NCCL:
        return c10d.end(*c10d.functional_sum(x, group_name))
    # torch's kernels read whole vectors: contiguous, at an address that is a multiple of their size.
    dense = x.contiguous()
    is_aligned = dense.storage_offset() * dense.itemsize % VECTOR_BYTES == 0
    x = dense if is_aligned else dense.clone()
    memory = workspace_of(group_name, x.device).view_like(x)
    if algorithm == "one_shot":
        return symmetric.one_shot(memory, x, group_name)
    memory.copy_(x)
    return symmetric.two_shot(memory, torch.empty_like(x), group_name)


@all_reduce_by_size.register_kernel("cpu")
def _(x: Tensor, rows: str, group_name: str) -> Tensor:
    return c10d.end(*c10d.functional_sum(x, group_name))


@all_reduce_by_size.register_fake
def _(x: Tensor, rows: str, group_name: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


OP = torch.ops.tpcompile.all_reduce_by_size.default


def chosen(x: Tensor, rows: str, num_ranks: int) -> Algorithm:
    """The algorithm for a tensor whose sizes are known."""
    size_bytes, dtype = x.numel() * x.itemsize, dtype_name(x.dtype)
    return algorithm_for(rows, size_bytes=size_bytes, dtype=dtype, num_ranks=num_ranks)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")
