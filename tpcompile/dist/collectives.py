"""Tensor + process group -> tensor after a collective, with one stated gradient in eager and under compile.

    site                                      forward          backward         call
    column-linear input, replicated weight    identity         all-reduce       copy_to_tp
    row-linear output                         all-reduce       identity         all_reduce(dst="I")
    sums that ranks then use differently      all-reduce       all-reduce       all_reduce(dst="R")
    gather for work that differs per rank     all-gather       reduce-scatter   all_gather_single(dst="R")
    gather for work all ranks repeat          all-gather       own shard        all_gather_single(dst="I")
    row-linear output, sequence parallel      reduce-scatter   all-gather       reduce_scatter_single

`dst` is the type of the result: I, replicated with a replicated gradient (the ranks next repeat the same work);
R, replicated with a partial gradient (they do different work, so gradients must be summed).

To add a collective: one `_issue_*` function that holds the traced and the eager path, one autograd.Function whose
backward is written with `_issue_*` functions, one public function that validates. Private torch API used here:
`torch.ops._c10d_functional.*` and `c10d._resolve_process_group`, seen on torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tpcompile.errors import ConfigError

Dst = Literal["I", "R"]
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_RANK_INDEX: dict[tuple[int, torch.device], Tensor] = {}


def all_reduce(x: Tensor, *, group: dist.ProcessGroup | None, dst: Dst = "I", op: str = "sum") -> Tensor:
    """Reduce `x` over the group; same shape, contiguous, `x` is left as it was.

    dst="I": identity backward (row-linear output). dst="R": all-reduce backward (sum of squares of a distributed
    norm). A group of None or of size 1 returns `x` itself. Raises ConfigError before any communication for a
    non-tensor, an unknown `dst` or `op`, and for an `op` other than sum when a gradient is needed.
    """
    _check_tensor("all_reduce", x)
    _check_dst("all_reduce", dst)
    if op not in REDUCE_OPS:
        raise ConfigError(f"all_reduce: op={op!r} is unknown; choose from {', '.join(REDUCE_OPS)}")
    needs_grad = _needs_grad(x)
    if needs_grad and op != "sum":
        raise ConfigError(f"all_reduce: op={op!r} has no gradient here, only 'sum' has; detach the input")
    if _is_trivial(group):
        return x
    return _AllReduce.apply(x, group, dst) if needs_grad else _issue_all_reduce(x, op, group)


def copy_to_tp(x: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """Enter a tensor-parallel region: identity forward, all-reduce (sum) of the gradient backward.

    Use it once per replicated tensor that sharded work reads: the input of a column-parallel linear, or a replicated
    parameter applied to sharded activations. Returns `x` itself when no gradient is needed or the group is None or
    of size 1. Raises ConfigError for a non-tensor.
    """
    _check_tensor("copy_to_tp", x)
    return x if _is_trivial(group) or not _needs_grad(x) else _CopyToTp.apply(x, group)


def all_gather_single(x: Tensor, *, dim: int, group: dist.ProcessGroup | None, dst: Dst = "R") -> Tensor:
    """Concatenate every rank's `x` along `dim`: size n becomes n * group size. All ranks must pass equal shapes.

    dst="R": reduce-scatter backward. dst="I": backward keeps this rank's shard of the gradient. A group of None or of
    size 1 returns `x` itself. Raises ConfigError for a non-tensor, an unknown `dst` or a `dim` that `x` lacks.
    """
    _check_tensor("all_gather_single", x)
    _check_dst("all_gather_single", dst)
    dim = _checked_dim("all_gather_single", x, dim)
    if group is None or _is_trivial(group):
        return x
    if not _needs_grad(x):
        return _issue_all_gather(x, dim, group)
    rank_index = _rank_index(group.group_name, x.device) if dst == "I" else None
    return _AllGather.apply(x, rank_index, dim, group)


def reduce_scatter_single(x: Tensor, *, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """Sum `x` over the group and keep this rank's part of `dim`: size n becomes n / group size; all-gather backward.

    A group of None or of size 1 returns `x` itself. Raises ConfigError for a non-tensor, a `dim` that `x` lacks, and
    a size that the group size does not divide.
    """
    _check_tensor("reduce_scatter_single", x)
    dim = _checked_dim("reduce_scatter_single", x, dim)
    if group is None or _is_trivial(group):
        return x
    size, world = x.shape[dim], group.size()
    if size % world:
        raise ConfigError(
            f"reduce_scatter_single: size {size} of dim {dim} is not divisible by the group size {world}; "
            f"pad it to {-(-size // world) * world}"
        )
    return _ReduceScatter.apply(x, dim, group) if _needs_grad(x) else _issue_reduce_scatter(x, dim, group)


def scatter_single(x: Tensor, *, dim: int, group: dist.ProcessGroup | None, src: Dst = "I") -> Tensor:
    """Keep this rank's part of a replicated `x` along `dim`, without communication; a copy.

    src="I" (replicated gradient): all-gather backward. src="R" (partial gradient): zeros around the own part. A group
    of None or of size 1 returns `x` itself. Raises ConfigError as reduce_scatter_single.
    """
    _check_tensor("scatter_single", x)
    _check_dst("scatter_single", src)
    dim = _checked_dim("scatter_single", x, dim)
    if group is None or _is_trivial(group):
        return x
    size, world = x.shape[dim], group.size()
    if size % world:
        raise ConfigError(f"scatter_single: size {size} of dim {dim} is not divisible by the group size {world}")
    own = _rank_index(group.group_name, x.device)
    if src == "I":
        return _Scatter.apply(x, own, dim, group) if _needs_grad(x) else _own_shard(x, own, dim, world)
    return _own_shard(x, own, dim, world)


def rank_index(group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """This rank's place in the group as a tensor [1] int64; compiled code gets it as data, not as a number."""
    return _rank_index("" if group is None else group.group_name, device)


def _own_shard(x: Tensor, own: Tensor, dim: int, world: int) -> Tensor:
    return x.unflatten(dim, (world, -1)).index_select(dim, own).squeeze(dim)


def _check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise ConfigError(f"{name}: the input is a {type(x).__name__}; pass one tensor")


def _check_dst(name: str, dst: str) -> None:
    if dst not in ("I", "R"):
        raise ConfigError(f"{name}: dst={dst!r} is unknown; choose 'I' (replicated gradient) or 'R' (partial gradient)")


def _checked_dim(name: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ConfigError(f"{name}: dim={dim} is out of range for a tensor with {x.dim()} dims")
    return dim % x.dim()


def _needs_grad(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _is_trivial(group: dist.ProcessGroup | None) -> bool:
    return group is None or group.size() == 1


@torch.compiler.assume_constant_result
def _rank_index(group_name: str, device: torch.device) -> Tensor:
    """This rank's place in the group as a tensor [1]; a traced caller gets it as a graph input, not as a number."""
    rank = c10d._resolve_process_group(group_name).rank() if group_name else 0
    if (rank, device) not in _RANK_INDEX:
        _RANK_INDEX[rank, device] = torch.full((1,), rank, dtype=torch.int64, device=device)
    return _RANK_INDEX[rank, device]


def _issue_all_reduce(x: Tensor, op: str, group: Any) -> Tensor:
    if torch.compiler.is_compiling():
        work = torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group.group_name)
        return torch.ops._c10d_functional.wait_tensor(work)
    # A clone, because contiguous() copies nothing when x is contiguous and the reduce would overwrite a live input.
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=REDUCE_OPS[op], group=group)
    return out


def _issue_all_gather(x: Tensor, dim: int, group: Any) -> Tensor:
    world = group.size()
    if torch.compiler.is_compiling():
        work = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), world, group.group_name)
        out = torch.ops._c10d_functional.wait_tensor(work)
    else:
        x = x.detach().contiguous()
        out = x.new_empty((world * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x, group=group)
    # The collective stacks on dim 0 whatever the layout, so another dim is put in place by one copy.
    return out if dim == 0 else torch.cat(out.chunk(world, 0), dim)


def _issue_reduce_scatter(x: Tensor, dim: int, group: Any) -> Tensor:
    world = group.size()
    x = x.contiguous() if dim == 0 else torch.cat(x.chunk(world, dim), 0)
    if torch.compiler.is_compiling():
        work = torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", world, group.group_name)
        return torch.ops._c10d_functional.wait_tensor(work)
    out = x.new_empty((x.shape[0] // world, *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.detach(), group=group)
    return out


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dst: str) -> Tensor:
        ctx.group, ctx.dst = group, dst
        return _issue_all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (_issue_all_reduce(grad, "sum", ctx.group) if ctx.dst == "R" else grad), None, None


class _CopyToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _issue_all_reduce(grad, "sum", ctx.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank_index: Tensor | None, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group, ctx.keeps_shard = dim, group, rank_index is not None
        if rank_index is not None:
            ctx.save_for_backward(rank_index)
        return _issue_all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not ctx.keeps_shard:
            return _issue_reduce_scatter(grad, ctx.dim, ctx.group), None, None, None
        # narrow(dim, rank * n, n) would bake the rank into the graph. Selecting by a tensor is equal on all ranks,
        # copies bits (a reduce-scatter of n equal gradients divided by n rounds for n = 3) and talks to nobody.
        (rank_index,) = ctx.saved_tensors
        shards = grad.unflatten(ctx.dim, (ctx.group.size(), -1))
        return shards.index_select(ctx.dim, rank_index).squeeze(ctx.dim), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _issue_reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _issue_all_gather(grad, ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _own_shard(x, own, dim, group.size())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _issue_all_gather(grad, ctx.dim, ctx.group), None, None, None
