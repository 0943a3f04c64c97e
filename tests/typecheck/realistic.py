"""Tensor-parallel modules as users write them, each broken in one way, and correct ones; written before their rules.

Layers of decoders, vision and state-space models, losses, routers, context-parallel attention, in the APIs that people
use: our wrappers, functional collectives, `torch.distributed`, hand-written autograd.Functions.
"""

# B batch, S sequence, D model width, F hidden width, V vocabulary, H heads; lower case is this rank's share
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from tests.typecheck.cases import HEAD, QKV, SHARED_KV, SQUARE, WIDE, Case, heads, merged
from tests.typecheck.programs import BIAS, COLUMN, PLAIN, ROW, TP, WIDTH
from tpcompile.collectives import api as collectives

# Gathers.


def gathers_tokens_instead_of_features(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(m.comm.copy_to_tp(x), m.up)
    return m.comm.all_gather(logits, dim=1, dst="I")


def gathers_features(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(m.comm.copy_to_tp(x), m.up)
    return m.comm.all_gather(logits, dim=-1, dst="I")


def gathers_batch_instead_of_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    full = collectives.all_gather_single(x_BsD, dim=0, group=m.comm.group, dst="R")
    return m.comm.all_reduce(F.linear(F.silu(F.linear(full, m.up)), m.down))


def gathers_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    full = collectives.all_gather_single(x_BsD, dim=1, group=m.comm.group, dst="R")
    return m.comm.all_reduce(F.linear(F.silu(F.linear(full, m.up)), m.down))


def functional_gather_of_features_along_tokens(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    full = funcol.all_gather_tensor(h, gather_dim=1, group=m.comm.group)
    return m.comm.all_reduce(F.linear(full, m.middle))


def functional_gather_of_features(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    full = funcol.all_gather_tensor(h, gather_dim=2, group=m.comm.group)
    return m.comm.all_reduce(F.linear(F.linear(full[..., :WIDTH], m.up), m.down))


def gathers_a_partial_sum(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    return m.comm.all_gather(y, dim=-1, dst="I")[..., :WIDTH]


def functional_gather_of_a_partial_sum(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    return funcol.all_gather_tensor(y, gather_dim=0, group=m.comm.group)[:2] + x


def gathers_what_is_replicated(m: Any, x: Tensor) -> Tensor:
    y = m.comm.all_reduce(F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down))
    return m.comm.all_gather(y, dim=1, dst="I")


def gathers_replicated_logits(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(x, m.square)
    return m.comm.all_gather(logits, dim=-1, dst="I")


# Work along a sharded dim.


def cumsum_over_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    """A linear attention whose state is the sum of all tokens before."""
    state = torch.cumsum(x_BsD, dim=1)
    return m.comm.all_gather(state * torch.sigmoid(x_BsD), dim=1, dst="I")


def cumsum_with_carry(m: Any, x_BsD: Tensor) -> Tensor:
    totals = m.comm.all_gather(x_BsD.sum(1, keepdim=True), dim=1, dst="R")
    before = torch.arange(TP, device=x_BsD.device) < m.comm.rank_index(x_BsD.device)
    carry = (totals * before.view(1, -1, 1)).sum(1, keepdim=True)
    state = torch.cumsum(x_BsD, dim=1) + carry
    return m.comm.all_gather(state * torch.sigmoid(x_BsD), dim=1, dst="I")


def scan_of_gates_over_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    decay = torch.sigmoid(F.linear(x_BsD, m.comm.copy_to_tp(m.square))).log().cumsum(1).exp()
    return m.comm.all_gather(decay * x_BsD, dim=1, dst="I")


def token_shift_over_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    """RWKV mixes each token with the one before."""
    before = torch.roll(x_BsD, shifts=1, dims=1)
    return x_BsD + 0.5 * before


def rotates_halves_of_sharded_features(m: Any, x: Tensor) -> Tensor:
    """Rotary embedding over the full width, features sharded."""
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    h = h + torch.roll(h, shifts=WIDTH // 2, dims=-1)
    return m.comm.all_reduce(F.linear(h, m.down))


def rolls_whole_tokens(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    h = h + torch.roll(h, shifts=1, dims=1)
    return m.comm.all_reduce(F.linear(h, m.down))


def reverses_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    """The backward direction of a bidirectional model."""
    return x_BsD + torch.flip(x_BsD, (1,)) * m.comm.copy_to_tp(m.bias)


def convolves_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    """The short causal convolution of a state-space model."""
    weight = m.comm.copy_to_tp(m.kernel)
    y = F.conv1d(F.pad(x_BsD.transpose(1, 2), (2, 0)), weight, groups=WIDTH)
    return F.silu(y.transpose(1, 2))


def convolves_sharded_channels(m: Any, x: Tensor) -> Tensor:
    """A depthwise convolution does not mix channels."""
    h = F.linear(m.comm.copy_to_tp(x), m.up).transpose(1, 2)
    y = F.conv1d(F.pad(h, (2, 0)), m.kernel, groups=8)
    return m.comm.all_reduce(F.linear(F.silu(y.transpose(1, 2)), m.down))


def standardises_sharded_features(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    h = (h - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True)
    return m.comm.all_reduce(F.linear(h, m.down))


def normalises_queries_over_all_heads_locally(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(m.comm.copy_to_tp(x), m.qkv).split(8, -1)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    o = F.scaled_dot_product_attention(heads(q), heads(k), heads(v))
    return m.comm.all_reduce(F.linear(merged(o), m.down))


def pools_the_last_token_of_a_shard(m: Any, x_BsD: Tensor) -> Tensor:
    return F.linear(x_BsD[:, -1], m.comm.copy_to_tp(m.square))


def averages_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    pooled = x_BsD.mean(1)
    return F.linear(pooled, m.comm.copy_to_tp(m.square))


# Attention.


def causal_context_parallel(m: Any, x_BsD: Tensor) -> Tensor:
    q, k, v = F.linear(x_BsD, m.comm.copy_to_tp(m.wide)).chunk(3, -1)
    k, v = (m.comm.all_gather(t, dim=1, dst="R") for t in (k, v))
    return merged(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True))


def context_parallel_with_positions(m: Any, x_BsD: Tensor) -> Tensor:
    q, k, v = F.linear(x_BsD, m.comm.copy_to_tp(m.wide)).chunk(3, -1)
    k, v = (m.comm.all_gather(t, dim=1, dst="R") for t in (k, v))
    at = torch.arange(q.shape[1], device=q.device) + m.comm.rank_index(q.device) * q.shape[1]
    mask = torch.arange(k.shape[1], device=q.device) <= at.unsqueeze(1)
    return merged(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=mask))


def attends_to_its_own_tokens_only(m: Any, x_BsD: Tensor) -> Tensor:
    q, k, v = F.linear(x_BsD, m.comm.copy_to_tp(m.wide)).chunk(3, -1)
    return merged(F.scaled_dot_product_attention(heads(q), heads(k), heads(v)))


def masks_local_scores(m: Any, x_BsD: Tensor) -> Tensor:
    q, k, v = F.linear(x_BsD, m.comm.copy_to_tp(m.wide)).chunk(3, -1)
    k, v = (m.comm.all_gather(t, dim=1, dst="R") for t in (k, v))
    scores = torch.tril((heads(q) @ heads(k).transpose(-1, -2)).exp())
    return merged(scores @ heads(v) / scores.sum(-1, keepdim=True))


def shared_kv_head_without_sum(m: Any, x: Tensor) -> Tensor:
    x = m.comm.copy_to_tp(x)
    q = heads(F.linear(x, m.up))
    k, v = (heads(t) for t in F.linear(x, m.kv).split(HEAD, -1))
    o = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return m.comm.all_reduce(F.linear(merged(o), m.down))


def shared_kv_head(m: Any, x: Tensor) -> Tensor:
    x = m.comm.copy_to_tp(x)
    q = heads(F.linear(x, m.up))
    k, v = (heads(t) for t in F.linear(x, m.replicas.copy_to_tp(m.kv)).split(HEAD, -1))
    o = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return m.comm.all_reduce(F.linear(merged(o), m.down))


# Two layouts in one op.


def adds_rows_to_columns(m: Any, x: Tensor) -> Tensor:
    """Low-rank update of a weight, sharded on the other dim."""
    weight = m.row_shard + m.column_shard
    return m.comm.all_reduce(F.linear(F.linear(m.comm.copy_to_tp(x), m.up), weight))


def column_linear_on_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    """The gather before the linear was forgotten."""
    h = F.silu(F.linear(x_BsD, m.up))
    return m.comm.reduce_scatter(F.linear(h, m.down), dim=1)


# Reduces.


def reduces_under_no_grad(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    with torch.no_grad():
        y = m.comm.all_reduce(y)
    return x + y


@torch.no_grad()
def _summed(y: Tensor, group: Any) -> Tensor:
    return funcol.all_reduce(y, "sum", group)


def reduces_in_a_helper_without_gradient(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    return x * m.bias + _summed(y, m.comm.group)


def reduces_what_was_detached(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    return x + m.comm.all_reduce(y.detach())


def logs_under_no_grad(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    with torch.no_grad():
        seen = m.comm.all_reduce(y.clone()).abs().max()
    return m.comm.all_reduce(y) + 0 * seen


def sums_local_means(m: Any, x_BsD: Tensor) -> Tensor:
    loss = F.linear(x_BsD, m.comm.copy_to_tp(m.square)).square().mean()
    return m.comm.all_reduce(loss)


def averages_local_means(m: Any, x_BsD: Tensor) -> Tensor:
    loss = F.linear(x_BsD, m.comm.copy_to_tp(m.square)).square().mean()
    return m.comm.all_reduce(loss) / m.comm.size


def sums_local_mean_squares(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    mean = m.comm.all_reduce(h.square().mean(-1, keepdim=True), dst="R")
    return m.comm.all_reduce(F.linear(h * torch.rsqrt(mean + 1e-6), m.down))


def averages_a_row_linear(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    return collectives.all_reduce(y, group=m.comm.group, op="avg")


def reduces_a_shard(m: Any, x: Tensor) -> Tensor:
    """The second linear was forgotten: features of different ranks are added."""
    h = F.gelu(F.linear(m.comm.copy_to_tp(x), m.up))
    return m.comm.all_reduce(h)


def residual_before_reduce(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    return m.comm.all_reduce(x + y)


def one_branch_unreduced(m: Any, x: Tensor) -> Tensor:
    """Attention and MLP in parallel; one of the two has its reduce."""
    x_in = m.comm.copy_to_tp(x)
    one = m.comm.all_reduce(F.linear(F.relu(F.linear(x_in, m.up)), m.down))
    two = F.linear(F.silu(F.linear(x_in, m.up)), m.down)
    return x + one + two


def gate_without_copy(m: Any, x: Tensor) -> Tensor:
    gate = torch.sigmoid(F.linear(x, m.router))
    h = F.relu(F.linear(m.comm.copy_to_tp(x), m.up)) * gate
    return m.comm.all_reduce(F.linear(h, m.down))


def scores_by_local_maximum(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(m.comm.copy_to_tp(x), m.up)
    top = logits.amax(-1, keepdim=True)
    total = m.comm.all_reduce((logits - top).exp().sum(-1, keepdim=True))
    return total.log()


def token_of_a_shard(m: Any, x: Tensor) -> Tensor:
    """Greedy decoding from sharded logits."""
    logits = F.linear(m.comm.copy_to_tp(x), m.up)
    return F.embedding(logits.argmax(-1), m.square)


def in_place_gather(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    full = h.new_empty(TP * h.shape[0], *h.shape[1:])
    dist.all_gather_into_tensor(full, h.contiguous(), group=m.comm.group)
    return torch.cat(full.chunk(TP), -1)


# Correct ones without a broken twin.


def merges_log_sums(m: Any, x: Tensor) -> Tensor:
    """Stable log-sum-exp over a sharded vocabulary: local ones are merged by their maximum."""
    own = torch.logsumexp(F.linear(m.comm.copy_to_tp(x), m.up), -1)
    top = collectives.all_reduce(own.detach(), group=m.comm.group, op="max")
    return top + m.comm.all_reduce((own - top).exp()).log()


def merges_maximum_and_sum(m: Any, x: Tensor) -> Tensor:
    """The same with the local maximum and sum, as flash decoding has them."""
    logits = F.linear(m.comm.copy_to_tp(x), m.up)
    own_top = logits.detach().amax(-1)
    own_sum = (logits - own_top.unsqueeze(-1)).exp().sum(-1)
    top = collectives.all_reduce(own_top, group=m.comm.group, op="max")
    return top + m.comm.all_reduce(own_sum * (own_top - top).exp()).log()


def mean_of_all_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    loss = F.linear(x_BsD, m.comm.copy_to_tp(m.square)).square()
    return m.comm.all_reduce(loss.sum()) / (loss.numel() * m.comm.size)


def scaled_before_the_sum(m: Any, x_BsD: Tensor) -> Tensor:
    loss = F.linear(x_BsD, m.comm.copy_to_tp(m.square)).square().mean() / m.comm.size
    return m.comm.all_reduce(loss)


SEQ = {"square": SQUARE}
FUNCTIONAL = PLAIN | {"middle": ((WIDTH, 8), 1)}

BROKEN = (
    Case(gathers_tokens_instead_of_features, {"up": COLUMN}, twin=gathers_features),
    Case(gathers_batch_instead_of_tokens, PLAIN, "V(1)", twin=gathers_tokens),
    Case(functional_gather_of_features_along_tokens, FUNCTIONAL, twin=functional_gather_of_features),
    Case(gathers_a_partial_sum, PLAIN),
    Case(functional_gather_of_a_partial_sum, PLAIN),
    Case(gathers_what_is_replicated, PLAIN),
    Case(gathers_replicated_logits, SEQ),
    Case(cumsum_over_sharded_tokens, {}, "V(1)", twin=cumsum_with_carry),
    Case(scan_of_gates_over_sharded_tokens, SEQ, "V(1)"),
    Case(token_shift_over_sharded_tokens, {}, "V(1)", "V(1)"),
    Case(rotates_halves_of_sharded_features, PLAIN, twin=rolls_whole_tokens),
    Case(reverses_sharded_tokens, {"bias": BIAS}, "V(1)", "V(1)"),
    Case(convolves_sharded_tokens, {"kernel": ((WIDTH, 1, 3), None)}, "V(1)", "V(1)"),
    Case(standardises_sharded_features, PLAIN),
    Case(normalises_queries_over_all_heads_locally, {"qkv": QKV, "down": ROW}),
    Case(pools_the_last_token_of_a_shard, SEQ, "V(1)"),
    Case(averages_sharded_tokens, SEQ, "V(1)"),
    Case(causal_context_parallel, WIDE, "V(1)", "V(1)", twin=context_parallel_with_positions),
    Case(attends_to_its_own_tokens_only, WIDE, "V(1)", "V(1)"),
    Case(masks_local_scores, WIDE, "V(1)", "V(1)"),
    Case(shared_kv_head_without_sum, PLAIN | {"kv": SHARED_KV}, twin=shared_kv_head),
    Case(adds_rows_to_columns, {"up": COLUMN, "row_shard": ((8, 8), 0), "column_shard": ((8, 8), 1)}),
    Case(column_linear_on_sharded_tokens, PLAIN, "V(1)", "V(1)"),
    Case(reduces_under_no_grad, PLAIN, twin=logs_under_no_grad),
    Case(reduces_in_a_helper_without_gradient, PLAIN | {"bias": BIAS}),
    Case(reduces_what_was_detached, PLAIN),
    Case(sums_local_means, SEQ, "V(1)", twin=averages_local_means),
    Case(sums_local_mean_squares, PLAIN),
    Case(averages_a_row_linear, PLAIN),
    Case(reduces_a_shard, PLAIN),
    Case(residual_before_reduce, PLAIN),
    Case(one_branch_unreduced, PLAIN),
    Case(gate_without_copy, PLAIN | {"router": ((8, WIDTH), None)}),
    Case(scores_by_local_maximum, PLAIN),
    Case(token_of_a_shard, PLAIN | SEQ),
    Case(in_place_gather, PLAIN),
)
ALONE = (
    Case(merges_log_sums, {"up": COLUMN}),
    Case(merges_maximum_and_sum, {"up": COLUMN}),
    Case(mean_of_all_tokens, SEQ, "V(1)"),
    Case(scaled_before_the_sum, SEQ, "V(1)"),
    Case(convolves_sharded_channels, PLAIN | {"kernel": ((8, 1, 3), 0)}),
)
CORRECT = (*ALONE, *(Case(c.twin, c.layouts, c.input_type, c.output_type) for c in BROKEN if c.twin is not None))
