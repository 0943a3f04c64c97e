"""A third set of modules, 10 broken and 8 correct: families that the first two sets lack, written before any run.

`docs/typecheck.md` has the rate of the first run, of our rules and of spmd_types.
"""

# B batch, S sequence, D model width, F hidden width, V vocabulary, H heads; lower case is this rank's share
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.typecheck.cases import HEAD, SQUARE, Case, heads, merged
from tests.typecheck.programs import BIAS, COLUMN, LOCAL, PLAIN, TP, WIDTH
from tpcompile.collectives import api as collectives


def _ids(x: Tensor) -> Tensor:
    """Token ids [2, 8] of a vocabulary of TP * LOCAL."""
    return (torch.arange(16, device=x.device) * 5 % (TP * LOCAL)).view(2, 8)


def _by_expert(rows: Tensor) -> Tensor:
    """Token i belongs to expert i % TP: tokens in order of their expert."""
    return rows.unflatten(0, (-1, TP)).transpose(0, 1).flatten(0, 1)


def _by_token(rows: Tensor) -> Tensor:
    return rows.unflatten(0, (TP, -1)).transpose(0, 1).flatten(0, 1)


# Experts: one on each rank, tokens routed by position, an all-to-all to them and one back.


def _dispatched(m: Any, x_BsD: Tensor) -> Tensor:
    gate = torch.sigmoid(F.linear(x_BsD, m.comm.copy_to_tp(m.router)))
    rows = _by_expert((x_BsD * gate).transpose(0, 1))
    received = collectives.all_to_all_single(rows, group=m.comm.group, dim=0)
    return F.gelu(received @ m.expert[0])


def experts_keep_the_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    """The all-to-all back is missing: each token gets the result of a different token."""
    return x_BsD + _by_token(_dispatched(m, x_BsD)).transpose(0, 1)


def experts_send_the_tokens_back(m: Any, x_BsD: Tensor) -> Tensor:
    done = collectives.all_to_all_single(_dispatched(m, x_BsD), group=m.comm.group, dim=0)
    return x_BsD + _by_token(done).transpose(0, 1)


# Vocabulary.


def _sharded_softmax(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the sum over the whole vocabulary, and the target's logit, zero where a different rank has it."""
    logits = F.linear(m.comm.copy_to_tp(x), m.up)
    top = collectives.all_reduce(logits.detach().amax(-1), group=m.comm.group, op="max")
    total = m.comm.all_reduce((logits - top.unsqueeze(-1)).exp().sum(-1))
    own = _ids(x) - m.comm.rank_index(x.device) * LOCAL
    is_own = (own >= 0) & (own < LOCAL)
    picked = logits.gather(-1, own.clamp(0, LOCAL - 1).unsqueeze(-1)).squeeze(-1)
    return total.log() + top, torch.where(is_own, picked, 0.0)


def cross_entropy_of_the_own_targets(m: Any, x: Tensor) -> Tensor:
    """The logits of the targets are not summed."""
    log_sum, picked = _sharded_softmax(m, x)
    return (log_sum - picked).mean()


def cross_entropy_with_z_loss(m: Any, x: Tensor) -> Tensor:
    log_sum, picked = _sharded_softmax(m, x)
    return (log_sum - m.comm.all_reduce(picked) + 1e-4 * log_sum.square()).mean()


def _embedded(m: Any, x: Tensor) -> Tensor:
    own = _ids(x) - m.comm.rank_index(x.device) * LOCAL
    is_own = (own >= 0) & (own < LOCAL)
    rows = F.embedding(own.clamp(0, LOCAL - 1), m.table)
    return x + m.comm.all_reduce(rows * is_own.unsqueeze(-1))


def tied_head_without_copy(m: Any, x: Tensor) -> Tensor:
    """The head uses the embedding's table, and nothing sums the gradient of its input."""
    logits = F.linear(_embedded(m, x), m.table)
    return m.comm.all_gather(logits, dim=-1, dst="I")


def tied_head(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(m.comm.copy_to_tp(_embedded(m, x)), m.table)
    return m.comm.all_gather(logits, dim=-1, dst="I")


def best_token_of_local_numbers(m: Any, x: Tensor) -> Tensor:
    """Candidates are gathered, their numbers count from the rank's own first token."""
    logits = F.linear(m.comm.copy_to_tp(x), m.up).detach()
    values, ids = logits.topk(2, -1)
    values, ids = (m.comm.all_gather(t, dim=-1, dst="I") for t in (values, ids))
    token = ids.gather(-1, values.argmax(-1, keepdim=True)).squeeze(-1)
    return x + F.embedding(token, m.vocabulary)


def best_token(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(m.comm.copy_to_tp(x), m.up).detach()
    values, ids = logits.topk(2, -1)
    ids = ids + m.comm.rank_index(x.device) * LOCAL
    values, ids = (m.comm.all_gather(t, dim=-1, dst="I") for t in (values, ids))
    token = ids.gather(-1, values.argmax(-1, keepdim=True)).squeeze(-1)
    return x + F.embedding(token, m.vocabulary)


# Attention with 2 kv heads on 4 ranks: every rank holds both and takes the one that its queries use.


def _attended(m: Any, x: Tensor, both: Tensor) -> Tensor:
    own = both.unflatten(-1, (2, 2, HEAD)).index_select(-2, m.comm.rank_index(x.device) // 2)
    k, v = (t.transpose(1, 2) for t in own.unbind(2))
    q = heads(F.linear(m.comm.copy_to_tp(x), m.up))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return x + m.comm.all_reduce(F.linear(merged(o), m.down))


def takes_a_kv_head_without_copy(m: Any, x: Tensor) -> Tensor:
    return _attended(m, x, F.linear(x, m.both))


def takes_a_kv_head(m: Any, x: Tensor) -> Tensor:
    return _attended(m, x, m.comm.copy_to_tp(F.linear(x, m.both)))


# Random numbers, statistics, losses.


def drops_whole_features_by_a_seed_per_rank(m: Any, x: Tensor) -> Tensor:
    """Dropout after the reduce must be the same on all ranks."""
    y = m.comm.all_reduce(F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down))
    seeded = torch.Generator(x.device).manual_seed(1000 + m.comm.rank)
    keep = torch.rand(y.shape, generator=seeded, device=x.device) < 0.9
    return x + torch.where(keep, y / 0.9, 0.0)


def drops_sharded_features_by_a_seed_per_rank(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(F.linear(m.comm.copy_to_tp(x), m.up))
    seeded = torch.Generator(x.device).manual_seed(1000 + m.comm.rank)
    keep = torch.rand(h.shape, generator=seeded, device=x.device) < 0.9
    return x + m.comm.all_reduce(F.linear(torch.where(keep, h / 0.9, 0.0), m.down))


def weight_norm_of_a_sharded_dim(m: Any, x: Tensor) -> Tensor:
    """The norm of an output row counts this rank's columns only."""
    weight = torch._weight_norm(m.down, m.comm.copy_to_tp(m.gain).unsqueeze(-1), 0)
    return m.comm.all_reduce(F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), weight))


def weight_norm_with_a_sum(m: Any, x: Tensor) -> Tensor:
    squares = m.comm.all_reduce(m.down.square().sum(1, keepdim=True), dst="R")
    weight = m.down * torch.rsqrt(squares) * m.comm.copy_to_tp(m.gain).unsqueeze(-1)
    return m.comm.all_reduce(F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), weight))


def layer_norm_weights_of_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    """Each rank's gradient of the weights is of its own tokens."""
    h = F.layer_norm(x_BsD, (WIDTH,), m.norm, m.bias)
    h = m.comm.all_gather(h, dim=1, dst="R")
    return x_BsD + m.comm.reduce_scatter(F.linear(F.gelu(F.linear(h, m.up)), m.down), dim=1)


def batch_norm_of_a_sharded_batch(m: Any, x_bSD: Tensor) -> Tensor:
    norm, bias = m.comm.copy_to_tp(m.norm), m.comm.copy_to_tp(m.bias)
    return F.batch_norm(x_bSD.transpose(1, 2), None, None, norm, bias, training=True).transpose(1, 2)


def _masked_sums(m: Any, x_BsD: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the losses of the tokens that count, and their number."""
    counts = (x_BsD.detach()[..., 0] > 0).float()
    losses = F.linear(x_BsD, m.comm.copy_to_tp(m.square)).square().mean(-1)
    return (losses * counts).sum(), counts.sum()


def averages_masked_means(m: Any, x_BsD: Tensor) -> Tensor:
    """Ranks with few tokens that count weigh as much as those with many."""
    total, count = _masked_sums(m, x_BsD)
    return m.comm.all_reduce(total / count) / m.comm.size


def mean_of_masked_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    total, count = _masked_sums(m, x_BsD)
    return m.comm.all_reduce(total) / m.comm.all_reduce(count)


EXPERT = {"router": ((1, WIDTH), None), "expert": ((1, WIDTH, WIDTH), 0)}
KV = PLAIN | {"both": ((4 * HEAD, WIDTH), None)}
VOCABULARY = {"up": COLUMN, "vocabulary": ((TP * LOCAL, WIDTH), None)}
GAIN = PLAIN | {"gain": BIAS}
NORM = {"norm": BIAS, "bias": BIAS}
SEQ = {"square": SQUARE}

BROKEN = (
    Case(experts_keep_the_tokens, EXPERT, "V(1)", "V(1)", twin=experts_send_the_tokens_back),
    Case(cross_entropy_of_the_own_targets, {"up": COLUMN}, twin=cross_entropy_with_z_loss),
    Case(tied_head_without_copy, {"table": COLUMN}, twin=tied_head),
    Case(best_token_of_local_numbers, VOCABULARY, twin=best_token),
    Case(takes_a_kv_head_without_copy, KV, twin=takes_a_kv_head),
    Case(drops_whole_features_by_a_seed_per_rank, PLAIN, twin=drops_sharded_features_by_a_seed_per_rank),
    Case(weight_norm_of_a_sharded_dim, GAIN, twin=weight_norm_with_a_sum),
    Case(layer_norm_weights_of_sharded_tokens, PLAIN | NORM, "V(1)", "V(1)"),
    Case(batch_norm_of_a_sharded_batch, NORM, "V(0)", "V(0)"),
    Case(averages_masked_means, SEQ, "V(1)", twin=mean_of_masked_tokens),
)
NOT_DECIDED = (experts_keep_the_tokens, best_token_of_local_numbers, drops_whole_features_by_a_seed_per_rank)
"""Broken ones that our rules do not find: types say neither whose tokens an all-to-all brought, nor from where a number
counts, nor what a generator was seeded with."""
CORRECT = tuple(Case(c.twin, c.layouts, c.input_type, c.output_type) for c in BROKEN if c.twin is not None)
