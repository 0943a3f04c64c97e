"""Tensor parallelism written by hand, as in Megatron-LM, fairscale and vLLM: modules with a fault, and correct ones.

The line of the fault has the comment `# wrong`. f is identity forward and all-reduce backward, g the reverse.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.typecheck.cases import SQUARE, Case, heads, merged
from tests.typecheck.programs import BIAS, COLUMN, LOCAL, PLAIN, SHARDED_BIAS, TP, WIDTH


def _reduced(x: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, op=op, group=group)
    return x


def _joined(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _summed_part(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def _own_part(x: Tensor, group: Any) -> Tensor:
    return x.chunk(group.size(), -1)[group.rank()].contiguous()


def _function(name: str, forward: Any, backward: Any) -> Any:
    """A Function of one tensor and a group."""

    def run_forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return forward(x, group)

    def run_backward(ctx: Any, grad: Tensor) -> Any:
        return backward(grad, ctx.group), None

    body = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    return type(name, (torch.autograd.Function,), body)


def _same(x: Tensor, group: Any) -> Tensor:
    return x


Copy = _function("Copy", _same, _reduced)
Reduce = _function("Reduce", _reduced, _same)
ReduceBoth = _function("ReduceBoth", _reduced, _reduced)
Same = _function("Same", _same, _same)
Scatter = _function("Scatter", _own_part, _joined)
GatherTokens = _function("GatherTokens", _joined, _summed_part)
SliceTokens = _function("SliceTokens", _joined, lambda grad, group: grad.chunk(group.size())[group.rank()])
ScatterTokens = _function("ScatterTokens", _summed_part, _joined)
kept_copy = Copy.apply


class Scaled(torch.autograd.Function):
    """A norm's weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


def g_bias(m: Any, x: Tensor) -> Tensor:
    h = F.relu(F.linear(Copy.apply(x, m.comm.group), m.up))
    y = F.linear(h, m.down, m.bias)  # wrong
    return Reduce.apply(y, m.comm.group)


def g_bias_after(m: Any, x: Tensor) -> Tensor:
    h = F.relu(F.linear(Copy.apply(x, m.comm.group), m.up))
    return Reduce.apply(F.linear(h, m.down), m.comm.group) + m.bias


def g_relu(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.linear(Copy.apply(x, m.comm.group), m.up), m.down)
    return Reduce.apply(F.relu(y), m.comm.group)  # wrong


def g_then_relu(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.linear(kept_copy(x, m.comm.group), m.up), m.down)
    return F.relu(Reduce.apply(y, m.comm.group))


def no_f(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(F.linear(x, m.up))  # wrong
    return Reduce.apply(F.linear(h, m.down), m.comm.group)


def f_without_reduce(m: Any, x: Tensor) -> Tensor:
    x = Same.apply(x, m.comm.group)
    h = F.gelu(F.linear(x, m.up))  # wrong
    return Reduce.apply(F.linear(h, m.down), m.comm.group)


def no_g(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(F.linear(Copy.apply(x, m.comm.group), m.up))
    y = F.linear(h, m.down)
    return F.layer_norm(y, (WIDTH,), m.norm)  # wrong


def g_then_norm(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(F.linear(Copy.apply(x, m.comm.group), m.up))
    return F.layer_norm(Reduce.apply(F.linear(h, m.down), m.comm.group), (WIDTH,), m.norm)


def swapped(m: Any, x: Tensor) -> Tensor:
    x = Reduce.apply(x, m.comm.group)  # wrong
    return Copy.apply(F.linear(F.gelu(F.linear(x, m.up)), m.down), m.comm.group)


def g_reduces_back(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(F.linear(Copy.apply(x, m.comm.group), m.up))
    y = ReduceBoth.apply(F.linear(h, m.down), m.comm.group)
    return x + y  # wrong


def statistic_reduces_back(m: Any, x: Tensor) -> Tensor:
    h = F.linear(Copy.apply(x, m.comm.group), m.up)
    total = ReduceBoth.apply(h.square().sum(-1, keepdim=True), m.comm.group)
    return Reduce.apply(F.linear(h * torch.rsqrt(total / (TP * LOCAL)), m.down), m.comm.group)


def statistic_by_g(m: Any, x: Tensor) -> Tensor:
    h = F.linear(Copy.apply(x, m.comm.group), m.up)
    total = Reduce.apply(h.square().sum(-1, keepdim=True), m.comm.group)
    h = h * torch.rsqrt(total / (TP * LOCAL))  # wrong
    return Reduce.apply(F.linear(h, m.down), m.comm.group)


def local_statistic(m: Any, x: Tensor) -> Tensor:
    h = F.linear(Copy.apply(x, m.comm.group), m.up)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True))  # wrong
    return Reduce.apply(F.linear(h, m.down), m.comm.group)


def reduced_twice(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(F.linear(Copy.apply(x, m.comm.group), m.up))
    y = Reduce.apply(F.linear(h, m.down), m.comm.group)
    return Reduce.apply(y, m.comm.group)  # wrong


def copied_twice(m: Any, x: Tensor) -> Tensor:
    x = Copy.apply(x, m.comm.group)
    h = F.gelu(F.linear(Copy.apply(x, m.comm.group), m.up))  # wrong
    return Reduce.apply(F.linear(h, m.down), m.comm.group)


def tokens_mlp(m: Any, x_sBD: Tensor) -> Tensor:
    h = F.gelu(F.linear(GatherTokens.apply(x_sBD, m.comm.group), m.up))
    return ScatterTokens.apply(F.linear(h, m.down), m.comm.group)


def tokens_sliced_back(m: Any, x_sBD: Tensor) -> Tensor:
    x = SliceTokens.apply(x_sBD, m.comm.group)
    h = F.gelu(F.linear(x, m.up))  # wrong
    return ScatterTokens.apply(F.linear(h, m.down), m.comm.group)


def tokens_f_after_gather(m: Any, x_sBD: Tensor) -> Tensor:
    x = GatherTokens.apply(x_sBD, m.comm.group)
    h = F.gelu(F.linear(Copy.apply(x, m.comm.group), m.up))  # wrong
    return ScatterTokens.apply(F.linear(h, m.down), m.comm.group)


def tokens_g_as_well(m: Any, x_sBD: Tensor) -> Tensor:
    h = F.gelu(F.linear(GatherTokens.apply(x_sBD, m.comm.group), m.up))
    y = Reduce.apply(F.linear(h, m.down), m.comm.group)
    return ScatterTokens.apply(y, m.comm.group)  # wrong


def tokens_norm(m: Any, x_sBD: Tensor) -> Tensor:
    h = Scaled.apply(x_sBD, m.norm)  # wrong
    h = F.linear(GatherTokens.apply(h, m.comm.group), m.up)
    return ScatterTokens.apply(F.linear(h, m.down), m.comm.group)


def tokens_norm_copied(m: Any, x_sBD: Tensor) -> Tensor:
    h = Scaled.apply(x_sBD, Copy.apply(m.norm, m.comm.group))
    h = F.linear(GatherTokens.apply(h, m.comm.group), m.up)
    return ScatterTokens.apply(F.linear(h, m.down), m.comm.group)


def tokens_bias(m: Any, x_sBD: Tensor) -> Tensor:
    h = F.gelu(F.linear(GatherTokens.apply(x_sBD, m.comm.group), m.up))
    return ScatterTokens.apply(F.linear(h, m.down), m.comm.group) + m.bias  # wrong


def scaled(m: Any, x: Tensor) -> Tensor:
    h = Scaled.apply(x, m.norm)
    return Reduce.apply(F.linear(F.linear(Copy.apply(h, m.comm.group), m.up), m.down), m.comm.group)


def scaled_shard(m: Any, x: Tensor) -> Tensor:
    h = Scaled.apply(F.linear(Copy.apply(x, m.comm.group), m.up), m.own)
    return Reduce.apply(F.linear(h, m.down), m.comm.group)


def scaled_partial(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.linear(Copy.apply(x, m.comm.group), m.up), m.down)
    return Reduce.apply(Scaled.apply(y, m.norm), m.comm.group)  # wrong


def _rows(m: Any, x: Tensor, *, masked: bool, shifted: bool = True) -> Tensor:
    ids = x.detach()[..., 0].long().abs()
    start = m.comm.rank * LOCAL
    other = (ids < start) | (ids >= start + LOCAL)
    rows = F.embedding((ids - start if shifted else ids).masked_fill(other, 0), m.table)
    if masked:
        rows = rows.masked_fill(other.unsqueeze(-1), 0.0)
    return rows


def embedding(m: Any, x: Tensor) -> Tensor:
    return Reduce.apply(_rows(m, x, masked=True), m.comm.group)


def embedding_unmasked(m: Any, x: Tensor) -> Tensor:
    rows = _rows(m, x, masked=False)
    return Reduce.apply(rows, m.comm.group)  # wrong


def embedding_unmasked_by_wrapper(m: Any, x: Tensor) -> Tensor:
    rows = _rows(m, x, masked=False)
    return m.comm.all_reduce(rows)  # wrong


def embedding_times_mask(m: Any, x: Tensor) -> Tensor:
    ids = x.detach()[..., 0].long().abs() - m.comm.rank * LOCAL
    own = (ids >= 0) & (ids < LOCAL)
    return m.comm.all_reduce(F.embedding(ids * own, m.table) * own.unsqueeze(-1))


def embedding_written(m: Any, x: Tensor) -> Tensor:
    ids = x.detach()[..., 0].long().abs() - m.comm.rank * LOCAL
    other = (ids < 0) | (ids >= LOCAL)
    rows = F.embedding(ids.masked_fill(other, 0), m.table)
    rows[other, :] = 0.0
    return m.comm.all_reduce(rows)


def _attended(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(x, m.qkv).chunk(3, -1)
    return F.linear(merged(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)), m.down)


def attention(m: Any, x: Tensor) -> Tensor:
    return x + Reduce.apply(_attended(m, Copy.apply(x, m.comm.group)), m.comm.group)


def attention_residual_before_g(m: Any, x: Tensor) -> Tensor:
    y = _attended(m, Copy.apply(x, m.comm.group))
    return Reduce.apply(x + y, m.comm.group)  # wrong


def attention_residual_from_inside(m: Any, x: Tensor) -> Tensor:
    x = Copy.apply(x, m.comm.group)
    return x + Reduce.apply(_attended(m, x), m.comm.group)  # wrong


def gate(m: Any, x: Tensor) -> Tensor:
    inside = Copy.apply(x, m.comm.group)
    y = F.linear(F.silu(F.linear(inside, m.up)), m.down)
    return Reduce.apply(y, m.comm.group) * torch.sigmoid(F.linear(x, m.square))


def gate_before_g(m: Any, x: Tensor) -> Tensor:
    inside = Copy.apply(x, m.comm.group)
    y = F.linear(F.silu(F.linear(inside, m.up)), m.down)
    return Reduce.apply(y * torch.sigmoid(F.linear(x, m.square)), m.comm.group)  # wrong


def dropped_partial(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(Copy.apply(x, m.comm.group), m.up)), m.down)
    return x + F.gelu(y)  # wrong


BIASED = PLAIN | {"bias": BIAS}
NORMED = PLAIN | {"norm": BIAS}
TABLE = {"table": COLUMN}
QKV = {"qkv": ((24, WIDTH), 0), "down": ((WIDTH, 8), 1)}

BROKEN = (
    Case(g_bias, BIASED),
    Case(g_relu, PLAIN),
    Case(no_f, PLAIN),
    Case(f_without_reduce, PLAIN),
    Case(no_g, NORMED),
    Case(swapped, PLAIN),
    Case(g_reduces_back, PLAIN),
    Case(statistic_by_g, PLAIN),
    Case(local_statistic, PLAIN),
    Case(reduced_twice, PLAIN),
    Case(copied_twice, PLAIN),
    Case(tokens_sliced_back, PLAIN, "V(0)", "V(0)"),
    Case(tokens_f_after_gather, PLAIN, "V(0)", "V(0)"),
    Case(tokens_g_as_well, PLAIN, "V(0)", "V(0)"),
    Case(tokens_norm, NORMED, "V(0)", "V(0)"),
    Case(tokens_bias, BIASED, "V(0)", "V(0)"),
    Case(scaled_partial, NORMED),
    Case(embedding_unmasked, TABLE),
    Case(embedding_unmasked_by_wrapper, TABLE),
    Case(attention_residual_before_g, QKV),
    Case(attention_residual_from_inside, QKV),
    Case(gate_before_g, PLAIN | {"square": SQUARE}),
    Case(dropped_partial, PLAIN),
)
CORRECT = (
    Case(g_bias_after, BIASED),
    Case(g_then_relu, PLAIN),
    Case(g_then_norm, NORMED),
    Case(statistic_reduces_back, PLAIN),
    Case(tokens_mlp, PLAIN, "V(0)", "V(0)"),
    Case(tokens_norm_copied, NORMED, "V(0)", "V(0)"),
    Case(scaled, NORMED),
    Case(scaled_shard, PLAIN | {"own": SHARDED_BIAS}),
    Case(embedding, TABLE),
    Case(embedding_times_mask, TABLE),
    Case(embedding_written, TABLE),
    Case(attention, QKV),
    Case(gate, PLAIN | {"square": SQUARE}),
)
