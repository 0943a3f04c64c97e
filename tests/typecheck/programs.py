"""Small well-typed tensor-parallel programs: parameters with a layout each, and a forward."""

# B batch, S sequence, D model width, F hidden width, V vocabulary, H heads; lower case is this rank's share
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tpcompile.collectives import api as collectives
from tpcompile.collectives.strategies import Collectives
from tpcompile.layout import Part, ShardSpec

WIDTH, LOCAL, TOKENS, TP = 16, 8, 6, 4
Layout = tuple[tuple[int, ...], int | ShardSpec | None]

COLUMN, ROW = ((LOCAL, WIDTH), 0), ((WIDTH, LOCAL), 1)
BIAS, SHARDED_BIAS = ((WIDTH,), None), ((LOCAL,), 0)


class Program(nn.Module):
    """Parameters by name and layout (local shape, sharded dim or ShardSpec), and a forward over them."""

    def __init__(self, forward: Callable[..., Any], comm: Collectives, layouts: dict[str, Layout]) -> None:
        super().__init__()
        self.comm, self.program, self.layouts = comm, forward, layouts
        for name, (shape, _) in layouts.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {
            name: layout if isinstance(layout, ShardSpec) else ShardSpec(layout, parts=(Part(1),))
            for name, (_, layout) in self.layouts.items()
        }

    @property
    def replicas(self) -> Collectives:
        return self.comm.replicas(2)

    def forward(self, *inputs: Tensor) -> Any:
        return self.program(self, *inputs)


def built(forward: Callable[..., Any], **layouts: Layout) -> Callable[[Collectives], Program]:
    return lambda comm: Program(forward, comm, layouts)


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


# Well-typed programs.


def mlp(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(F.linear(m.comm.copy_to_tp(x), m.up, m.up_bias))
    return m.comm.all_reduce(F.linear(h, m.down), dst="I") + m.bias


def sequence_parallel_mlp(m: Any, x_sBD: Tensor) -> Tensor:
    h = x_sBD * torch.rsqrt(mean_square(x_sBD) + 1e-6) * m.comm.copy_to_tp(m.norm)
    h = F.silu(F.linear(m.comm.all_gather(h, dim=0, dst="R"), m.up))
    return x_sBD + m.comm.reduce_scatter(F.linear(h, m.down), dim=0) + m.comm.copy_to_tp(m.bias)


def distributed_norm(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    total = m.comm.all_reduce(h.square().sum(-1, keepdim=True), dst="R")
    h = h * torch.rsqrt(total / (LOCAL * m.comm.size) + 1e-6) * m.norm
    return m.comm.all_reduce(F.linear(h, m.down))


def vocabulary_loss(m: Any, ids: Tensor, targets: Tensor) -> Tensor:
    comm = m.comm
    start = comm.rank_index(ids.device) * LOCAL
    own = (ids >= start) & (ids < start + LOCAL)
    rows = F.embedding((ids - start).clamp(0, LOCAL - 1), m.table)
    x = comm.all_reduce(torch.where(own.unsqueeze(-1), rows, 0.0))
    logits = F.linear(comm.copy_to_tp(x), m.head)
    top = collectives.all_reduce(logits.detach().amax(-1, keepdim=True), group=comm.group, op="max")
    shifted = logits - top
    total = comm.all_reduce(shifted.exp().sum(-1))
    at = (targets - start).clamp(0, LOCAL - 1)
    is_own = (targets >= start) & (targets < start + LOCAL)
    picked = comm.all_reduce(torch.where(is_own, shifted.gather(-1, at.unsqueeze(-1)).squeeze(-1), 0.0))
    return (total.log() - picked).mean()


def summed_parts(m: Any, x: Tensor) -> Tensor:
    """Partial sums may be added, scaled, cast, viewed and accumulated before their one reduce."""
    x = m.comm.copy_to_tp(x)
    y = torch.zeros_like(x)
    for part in F.linear(F.relu(F.linear(x, m.up)), m.down).unsqueeze(0).repeat(2, 1, 1, 1):
        y += part
    y = (y - sum((F.linear(F.linear(x, m.up), m.down), -y)) / 3) * 0.5 * torch.full((1,), 2.0)
    return m.comm.all_reduce(y.to(torch.float64).transpose(0, 1).transpose(0, 1)).float()


def counted_mean(m: Any, x: Tensor) -> Tensor:
    """Uneven shards: the counts are summed as well."""
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    sums = torch.cat((h.square().sum(-1, keepdim=True), torch.full_like(h[..., :1], h.shape[-1])), -1)
    total, count = m.comm.all_reduce(sums, dst="R").unbind(-1)
    return m.comm.all_reduce(F.linear(h / (total / count).sqrt().unsqueeze(-1), m.down))


def mean_of_means(m: Any, x: Tensor) -> Tensor:
    """Equal shards: the average of the local means is the mean."""
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    mean = collectives.all_reduce(mean_square(h) + 1e-6, group=m.comm.group, dst="R", op="avg")
    return m.comm.all_reduce(F.linear(h * mean.rsqrt(), m.down))


def shifted_log_sums(m: Any, x: Tensor) -> Tensor:
    """A number added to a local log-sum-exp multiplies the sum behind it."""
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    total = m.comm.all_reduce((h.logsumexp(-1, keepdim=True) + 1.0).exp(), dst="R")
    return m.comm.all_reduce(F.linear(h / total, m.down))


def detached_statistics(m: Any, x: Tensor) -> Tensor:
    """Where no gradient flows, replicated is replicated: neither f nor dst matter."""
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    with torch.no_grad():
        scale = m.comm.all_reduce(h.abs().sum(-1, keepdim=True), dst="I")
    return m.comm.all_reduce(F.linear(h / scale, m.down))


def probed_partial(m: Any, x: Tensor) -> Tensor:
    """A partial sum may be looked at for NaN and infinity, and a local 2-norm squared is a sum."""
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    h = h / m.comm.all_reduce(h.norm(dim=-1, keepdim=True) ** 2, dst="R").sqrt()
    y = F.linear(h, m.down)
    return m.comm.all_reduce(y) + torch.isfinite(y).all() * torch.isnan(y).any()


def barrier(m: Any, x: Tensor) -> Tensor:
    """A reduce of a constant, to wait for each other."""
    m.comm.all_reduce(torch.ones(1, device=x.device))
    return x


class Checkpointed:
    """Activation checkpointing runs the program inside of an autograd.Function, or not."""

    def __init__(self, *, use_reentrant: bool) -> None:
        self.use_reentrant, self.__name__ = use_reentrant, f"checkpointed_{use_reentrant}"

    def __call__(self, m: Any, x: Tensor) -> Tensor:
        return x + checkpoint(functools.partial(mlp, m), x, use_reentrant=self.use_reentrant)


def grouped_attention(m: Any, x: Tensor) -> Tensor:
    """Heads as Hugging Face writes them: key heads repeated, a mask added, softmax in float32, dropout."""
    q, k, v = F.linear(m.comm.copy_to_tp(x), m.qkv).split([8, 8, 8], -1)
    q, k, v = (t.view(*x.shape[:2], -1, 2).transpose(1, 2) for t in (q, k, v))
    k = k[:, :2, None].expand(-1, -1, 2, -1, -1).reshape(q.shape)
    mask = torch.full((x.shape[1], x.shape[1]), -1e9, device=x.device).triu(1)
    weights = F.dropout((q @ k.transpose(-1, -2) / 1.4 + mask).float().softmax(-1), 0.1)
    o = (weights @ v[:, :2].repeat_interleave(2, 1)).transpose(1, 2).contiguous().view(*x.shape[:2], -1)
    return x + F.dropout(m.comm.all_reduce(F.linear(o, m.down)), 0.1)


def mixture_of_experts(m: Any, x: Tensor) -> Tensor:
    """One expert per rank, the router replicated; every rank weights by its own column."""
    probabilities = m.comm.copy_to_tp(F.linear(x, m.router).softmax(-1))
    own = probabilities.index_select(-1, m.comm.rank_index(x.device))
    hidden = F.relu(F.linear(m.comm.copy_to_tp(x), m.up))
    return x + m.comm.all_reduce(own * F.linear(hidden, m.down))


def written_in_place(m: Any, x: Tensor) -> Tensor:
    """Partial sums in buffers, written through views."""
    y = F.linear(F.linear(m.comm.copy_to_tp(x), m.up), m.down)
    total = x.new_zeros(x.shape)
    total[:, :3] += y[:, :3]
    total[:, 3:] = y[:, 3:]
    return m.comm.all_reduce(total)


def local_token_loss(m: Any, x_sBD: Tensor) -> Tensor:
    """Sequence parallel: sums of losses and counts of tokens are reduced."""
    logits = F.linear(x_sBD, m.comm.copy_to_tp(m.out)).flatten(0, 1)
    targets = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
    loss = F.cross_entropy(logits, targets, reduction="none")
    total, count = m.comm.all_reduce(torch.stack((loss.sum(), torch.full_like(loss[0], len(loss))))).unbind()
    return total / count


class OwnCopy(torch.autograd.Function):
    """A hand-written f, as Megatron-LM has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def hand_written_function(m: Any, x: Tensor) -> Tensor:
    """The gradient of a hand-written autograd.Function is its author's business."""
    h = F.gelu(F.linear(OwnCopy.apply(x, m.comm.group), m.up))
    return m.comm.all_reduce(F.linear(h, m.down))


def einsum_attention(m: Any, x: Tensor) -> Tensor:
    """Heads written out with einsum, softmax over keys that are not sharded, and slices of a packed projection."""
    q, k, v = F.linear(m.comm.copy_to_tp(x), m.qkv).unflatten(-1, (3, 2, 4)).unbind(-3)
    scores = torch.einsum("bshe,bthe->bhst", q, k) * 0.5
    o = torch.einsum("bhst,bthe->bshe", scores.softmax(-1), v)
    return m.comm.all_reduce(F.linear(o.reshape(*x.shape[:2], -1), m.down))


MLP = {"up": COLUMN, "up_bias": SHARDED_BIAS, "down": ROW, "bias": BIAS}
PLAIN = {"up": COLUMN, "down": ROW}
NORM = PLAIN | {"norm": SHARDED_BIAS}
SEQUENCE = PLAIN | {"norm": BIAS, "bias": BIAS}
VOCABULARY = {"table": ((LOCAL, WIDTH), 0), "head": ((LOCAL, WIDTH), 0)}


CLEAN = (
    (mlp, MLP, "I", "I"),
    (sequence_parallel_mlp, SEQUENCE, "V(0)", "V(0)"),
    (distributed_norm, NORM, "I", "I"),
    (summed_parts, PLAIN, "I", "I"),
    (counted_mean, PLAIN, "I", "I"),
    (mean_of_means, PLAIN, "I", "I"),
    (shifted_log_sums, PLAIN, "I", "I"),
    (detached_statistics, PLAIN, "I", "I"),
    (hand_written_function, PLAIN, "I", "I"),
    (probed_partial, PLAIN, "I", "I"),
    (barrier, {}, "I", "I"),
    (Checkpointed(use_reentrant=True), MLP, "I", "I"),
    (Checkpointed(use_reentrant=False), MLP, "I", "I"),
    (grouped_attention, {"qkv": ((3 * LOCAL, WIDTH), 0), "down": ROW}, "I", "I"),
    (mixture_of_experts, PLAIN | {"router": ((TP, WIDTH), None)}, "I", "I"),
    (written_in_place, PLAIN, "I", "I"),
    (local_token_loss, {"out": ((12, WIDTH), None)}, "V(0)", "I"),
    (einsum_attention, {"qkv": ((3 * LOCAL, WIDTH), 0), "down": ROW}, "I", "I"),
)
