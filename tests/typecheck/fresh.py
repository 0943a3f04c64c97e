"""A second set of modules as users write them, 20 broken and 8 correct: written after the rules, for their rate.

`docs/typecheck.md` has the rate as it came. What was missed then was added to the rules later.
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
from tests.typecheck.programs import COLUMN, PLAIN, ROW, TP, WIDTH
from tpcompile.collectives import api as collectives


def gated_linear_unit_gathers_the_wrong_axis(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    gate = torch.sigmoid(m.comm.all_gather(h, dim=0, dst="R"))
    return m.comm.all_reduce(F.linear((gate[:2] * h), m.down))


def ulysses_gathers_heads_as_tokens(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(m.comm.copy_to_tp(x), m.qkv).split(8, -1)
    o = F.scaled_dot_product_attention(heads(q), heads(k), heads(v))
    return F.linear(merged(m.comm.all_gather(o, dim=2, dst="I"))[:, :8], m.mix)


def list_gather_of_partial_logits(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(F.relu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    return torch.softmax(funcol.all_gather_tensor(logits, 2, m.comm.group), -1)[..., :WIDTH]


def gathers_hidden_states_that_were_reduced(m: Any, x_BsD: Tensor) -> Tensor:
    full = m.comm.all_gather(x_BsD, dim=1, dst="R")
    y = m.comm.all_reduce(F.linear(F.silu(F.linear(full, m.up)), m.down))
    return m.comm.all_gather(y, dim=1, dst="I").mean(1)


def prefix_sum_attention_over_shards(m: Any, x_BsD: Tensor) -> Tensor:
    k, v, q = F.linear(x_BsD, m.comm.copy_to_tp(m.wide)).chunk(3, -1)
    state = (k.softmax(-1) * v).cumsum(dim=1)
    return q * state / (1 + k.abs().cumsum(dim=1))


def discounted_product_over_shards(m: Any, x_BsD: Tensor) -> Tensor:
    decay = torch.cumprod(torch.sigmoid(x_BsD), dim=1)
    return x_BsD * decay


def time_mix_with_pad(m: Any, x_BsD: Tensor) -> Tensor:
    """A token shift by padding and cutting."""
    before = F.pad(x_BsD, (0, 0, 1, -1))
    return torch.lerp(x_BsD, before, 0.5)


def channel_shuffle_of_sharded_features(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    h = torch.roll(F.gelu(h), 1, -1) * F.gelu(h)
    return m.comm.all_reduce(F.linear(h, m.down))


def bidirectional_mixer(m: Any, x_BsD: Tensor) -> Tensor:
    forward, backward = x_BsD, x_BsD.flip(1)
    y = F.linear(torch.cat((forward, backward), -1), m.comm.copy_to_tp(m.twice))
    return y


def sequence_parallel_causal_attention(m: Any, x_BsD: Tensor) -> Tensor:
    """Queries stay where they are, the rest of the sequence is gathered."""
    full = collectives.all_gather_single(x_BsD, dim=1, group=m.comm.group, dst="R")
    q = heads(F.linear(x_BsD, m.comm.copy_to_tp(m.square)))
    k = heads(F.linear(full, m.comm.copy_to_tp(m.square)))
    return x_BsD + merged(F.scaled_dot_product_attention(q, k, k, is_causal=True))


def multi_query_attention_without_sum(m: Any, x: Tensor) -> Tensor:
    entered = m.comm.copy_to_tp(x)
    kv = F.linear(entered, m.kv).unflatten(-1, (2, HEAD))
    q = F.linear(entered, m.up).unflatten(-1, (-1, HEAD))
    scores = torch.einsum("bshe,bte->bhst", q, kv[:, :, 0]).softmax(-1)
    o = torch.einsum("bhst,bte->bshe", scores, kv[:, :, 1])
    return m.comm.all_reduce(F.linear(o.flatten(2), m.down))


def lora_of_two_layouts(m: Any, x: Tensor) -> Tensor:
    entered = m.comm.copy_to_tp(x)
    h = F.linear(entered, m.up) + F.linear(entered, m.wide_rows).transpose(1, 2)
    return m.comm.all_reduce(F.linear(h, m.down))


def expert_on_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    hidden = torch.relu(torch.einsum("bsd,fd->bsf", x_BsD, m.up))
    return m.comm.all_gather(torch.einsum("bsf,df->bsd", hidden, m.down), dim=1, dst="I")


def inference_style_block(m: Any, x: Tensor) -> Tensor:
    """The reduce was copied from serving code."""
    out = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    with torch.no_grad():
        summed = funcol.all_reduce(out, "sum", m.comm.group)
    return x + summed.detach() * 1.0


def data_of_a_partial_sum(m: Any, x: Tensor) -> Tensor:
    out = F.linear(torch.tanh(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    return F.layer_norm(x + m.comm.all_reduce(out.data), (WIDTH,))


def token_loss_is_averaged_then_added(m: Any, x_BsD: Tensor) -> Tensor:
    logits = F.linear(x_BsD, m.comm.copy_to_tp(m.square)).flatten(0, 1)
    targets = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
    return m.comm.all_reduce(F.cross_entropy(logits, targets)) * 0.5


def auxiliary_loss_of_local_means(m: Any, x_BsD: Tensor) -> Tensor:
    probabilities = F.linear(x_BsD, m.comm.copy_to_tp(m.square)).softmax(-1)
    load = m.comm.all_reduce(probabilities.mean((0, 1)))
    return (load * load).sum()


def rms_norm_sums_means(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(m.comm.copy_to_tp(x), m.qkv).chunk(3, -1)
    variance = m.comm.all_reduce(q.pow(2).mean(-1, keepdim=True), dst="R")
    q = q * torch.rsqrt(variance + 1e-6)
    o = F.scaled_dot_product_attention(heads(q), heads(k), heads(v))
    return m.comm.all_reduce(F.linear(merged(o), m.down))


def adds_hidden_features_of_all_ranks(m: Any, x: Tensor) -> Tensor:
    gate = torch.sigmoid(F.linear(m.comm.copy_to_tp(x), m.up))
    pooled = m.comm.all_reduce(gate.mean(1, keepdim=True), dst="R")
    return m.comm.all_reduce(F.linear(gate * pooled, m.down))


def temporal_pooling_of_shards(m: Any, x_BsD: Tensor) -> Tensor:
    smooth = F.avg_pool1d(x_BsD.transpose(1, 2), 3, stride=1, padding=1).transpose(1, 2)
    return F.linear(smooth, m.comm.copy_to_tp(m.square))


# Correct ones.


def ring_merge_of_two_statistics(m: Any, x: Tensor) -> Tensor:
    """A distributed softmax with a detached maximum, and one packed reduce."""
    logits = F.linear(m.comm.copy_to_tp(x), m.up)
    top = collectives.all_reduce(logits.detach().amax(-1, keepdim=True), group=m.comm.group, op="max")
    weights = (logits - top).exp()
    total = m.comm.all_reduce(weights.sum(-1, keepdim=True), dst="R")
    return m.comm.all_reduce(F.linear(weights / total, m.down))


def keys_sharded_decode(m: Any, x_BsD: Tensor) -> Tensor:
    """Decoding with a cache that is sharded over tokens: local attentions merged by their log-sum-exp."""
    q = m.comm.copy_to_tp(m.query)
    scores = q @ x_BsD.transpose(-1, -2)
    own = torch.logsumexp(scores, -1, keepdim=True)
    o = scores.softmax(-1) @ x_BsD
    top = collectives.all_reduce(own.detach(), group=m.comm.group, op="max")
    weight = (own - top).exp()
    return m.comm.all_reduce(o * weight) / m.comm.all_reduce(weight)


def stacked_gather_and_sum(m: Any, x: Tensor) -> Tensor:
    """A reduce in a fixed order."""
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    return m.comm.all_gather(y.unsqueeze(0), dim=0, dst="I").sum(0)


def gathers_by_chunks(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    parts = m.comm.all_gather(h, dim=0, dst="I").chunk(TP, 0)
    return torch.cat(parts, -1)


def shift_with_halo(m: Any, x_BsD: Tensor) -> Tensor:
    """The last token of the rank before is put in front."""
    last = m.comm.all_gather(x_BsD[:, -1:], dim=1, dst="R")
    before = F.pad(last, (0, 0, 1, 0)).index_select(1, m.comm.rank_index(x_BsD.device))
    shifted = torch.roll(x_BsD, 1, 1)
    shifted[:, :1] = before
    return x_BsD + shifted


def grouped_query_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(m.comm.copy_to_tp(x), m.qkv).chunk(3, -1)
    k, v = (heads(t)[:, :1] for t in (k, v))
    o = F.scaled_dot_product_attention(heads(q), k, v, is_causal=True, enable_gqa=True)
    return x + m.comm.all_reduce(F.linear(merged(o), m.down))


def load_balancing_loss(m: Any, x_BsD: Tensor) -> Tensor:
    probabilities = F.linear(x_BsD, m.comm.copy_to_tp(m.square)).softmax(-1)
    load = collectives.all_reduce(probabilities.mean((0, 1)), group=m.comm.group, op="avg", dst="I")
    return (load * load).sum()


def evaluates_with_metrics(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = F.relu(F.linear(m.comm.copy_to_tp(x), m.up))
    with torch.no_grad():
        dead = (h == 0).float().sum((0, 1, 2))
        dist.all_reduce(dead, group=m.comm.group)
    return m.comm.all_reduce(F.linear(h, m.down)), dead


SEQ = {"square": SQUARE}
BROKEN = (
    Case(gated_linear_unit_gathers_the_wrong_axis, PLAIN),
    Case(ulysses_gathers_heads_as_tokens, {"qkv": QKV, "mix": ((WIDTH, 8), None)}),
    Case(list_gather_of_partial_logits, PLAIN),
    Case(gathers_hidden_states_that_were_reduced, PLAIN, "V(1)"),
    Case(prefix_sum_attention_over_shards, WIDE, "V(1)", "V(1)"),
    Case(discounted_product_over_shards, {}, "V(1)", "V(1)"),
    Case(time_mix_with_pad, {}, "V(1)", "V(1)"),
    Case(channel_shuffle_of_sharded_features, PLAIN),
    Case(bidirectional_mixer, {"twice": ((WIDTH, 2 * WIDTH), None)}, "V(1)", "V(1)"),
    Case(sequence_parallel_causal_attention, SEQ, "V(1)", "V(1)"),
    Case(multi_query_attention_without_sum, PLAIN | {"kv": SHARED_KV}),
    Case(lora_of_two_layouts, PLAIN | {"wide_rows": COLUMN}),
    Case(expert_on_sharded_tokens, PLAIN, "V(1)"),
    Case(inference_style_block, PLAIN),
    Case(data_of_a_partial_sum, PLAIN),
    Case(token_loss_is_averaged_then_added, SEQ, "V(1)"),
    Case(auxiliary_loss_of_local_means, SEQ, "V(1)"),
    Case(rms_norm_sums_means, {"qkv": QKV, "down": ROW}),
    Case(adds_hidden_features_of_all_ranks, PLAIN),
    Case(temporal_pooling_of_shards, SEQ, "V(1)", "V(1)"),
)
CORRECT = (
    Case(ring_merge_of_two_statistics, PLAIN),
    Case(keys_sharded_decode, {"query": ((2, 4, WIDTH), None)}, "V(1)"),
    Case(stacked_gather_and_sum, PLAIN),
    Case(gathers_by_chunks, {"up": COLUMN}),
    Case(shift_with_halo, {}, "V(1)", "V(1)"),
    Case(grouped_query_attention, {"qkv": QKV, "down": ROW}),
    Case(load_balancing_loss, SEQ, "V(1)"),
    Case(evaluates_with_metrics, PLAIN, "I", "I"),
)
