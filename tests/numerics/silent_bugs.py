"""Kinds of silent bugs of public reports, as small programs: those of TTrace (arXiv 2506.09280) and of our own issues.

Bugs of context, data and pipeline parallelism are rebuilt on the ranks of one group. The line to blame has the comment
`# fault`.
"""

# Letters of shapes: see wrong_programs.py
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.numerics import wrong_programs as w
from tpcompile.collectives import api as collectives


def _largest(m: Any, x: Tensor) -> Tensor:
    return collectives.all_reduce(x, op="max", group=m.comm.group) if m.comm.size > 1 else x


def log_probabilities(m: Any, x: Tensor) -> Tensor:
    """Of a sharded vocabulary: the log of the sum is read by every rank for its own tokens."""
    logits = F.linear(m.comm.copy_to_tp(x), m.table)
    top = _largest(m, logits.detach().amax(-1, keepdim=True))
    total = (logits - top).exp().sum(-1, keepdim=True)
    total = m.comm.all_reduce(total, dst="I" if m.is_wrong else "R")  # fault
    return logits - top - total.log()


def embedding_mask(m: Any, ids: Tensor) -> Tensor:
    """Bug 1: the mask leaves out a row that the rank has."""
    own, found = w.is_own(m, ids, len(m.table))
    if m.is_wrong:
        found = found & (own > 0)  # fault
    y = F.embedding(own, m.table).masked_fill(~found.unsqueeze(-1), 0.0)
    return m.comm.all_reduce(y)


def recomputed_with_a_different_input(m: Any, x: Tensor) -> Tensor:
    """Bug 2: what activation recomputation is given is not what the forward was given."""
    m.shift = 0.0

    def block(h: Tensor) -> Tensor:
        h = h + m.shift  # fault
        return m.comm.all_reduce(F.linear(F.gelu(F.linear(m.comm.copy_to_tp(h), m.up)), m.down))

    y = checkpoint(block, x, use_reentrant=False)
    m.shift = 0.1 if m.is_wrong else 0.0
    return y


def loss_scaled_by_ranks(m: Any, x_BsD: Tensor) -> Tensor:
    """Bug 3, context parallel: a loss that was summed over all tokens is divided by the ranks once more."""
    loss = F.linear(x_BsD, m.comm.copy_to_tp(m.square)).square().sum()
    loss = m.comm.all_reduce(loss) / (w.TOKENS * w.WIDTH)
    if m.is_wrong:
        loss = loss / m.comm.size  # fault
    return loss


def loss_not_averaged(m: Any, x_BsD: Tensor) -> Tensor:
    """Bug 4, data parallel: means of the ranks are added up."""
    y = F.linear(x_BsD, m.comm.copy_to_tp(m.square)).square()
    loss = m.comm.all_reduce(y.mean())  # fault
    return loss if m.is_wrong else loss / m.comm.size


def head_that_is_not_tied(m: Any, ids: Tensor) -> Tensor:
    """Bug 5: the head has a copy of the table, so the table's gradient misses that of the head."""
    own, found = w.is_own(m, ids, len(m.table))
    x = m.comm.all_reduce(torch.where(found.unsqueeze(-1), F.embedding(own, m.table), 0.0))
    head = m.table.detach().clone() if m.is_wrong else m.table
    return F.linear(m.comm.copy_to_tp(x), head)  # fault


def scale_of_the_local_maximum(m: Any, x: Tensor) -> Tensor:
    """Bugs 6 and 7, fp8: the scale is that of this rank's shard."""
    h = F.gelu(F.linear(m.comm.copy_to_tp(x), m.up))
    top = h.detach().abs().amax()  # fault
    if not m.is_wrong:
        top = _largest(m, top)
    rounded = h + ((h / top * 15).round() * top / 15 - h).detach()
    return m.comm.all_reduce(F.linear(rounded, m.down))


def update_of_the_own_rows(m: Any, x: Tensor) -> Tensor:
    """Bug 8, ZeRO: each rank updates its rows of a replicated weight, and nobody sends them on."""
    step = 0.1 * torch.sign(m.square.detach())
    rows = torch.arange(w.WIDTH) // (w.WIDTH // m.comm.size)
    if m.is_wrong:
        step = torch.where((rows == m.comm.rank).unsqueeze(-1), step, 0.0)  # fault
    return F.linear(x, m.square - step)


def layer_that_is_left_out(m: Any, x: Tensor) -> Tensor:
    """Bug 9, pipeline: the division into stages loses a layer."""
    for place, weight in enumerate((m.square, m.second, m.third)):
        if not (m.is_wrong and place == 1):
            x = torch.tanh(F.linear(x, weight))  # fault
    return x


def gradient_of_the_wrong_group(m: Any, x: Tensor) -> Tensor:
    """Bug 10: the gradient at the entry is summed over a group of one."""
    x = F.rms_norm(x, (w.WIDTH,), m.scale)
    entered = x.view_as(x) if m.is_wrong else m.comm.copy_to_tp(x)
    h = F.linear(entered, m.up)  # fault
    return m.comm.all_reduce(F.linear(F.silu(h), m.down))


def router_of_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    """Bug 11, sequence parallel: the gradient of the router is that of this rank's tokens."""
    weight = m.router if m.is_wrong else m.comm.copy_to_tp(m.router)
    gate = F.linear(x_BsD, weight).softmax(-1)  # fault
    return x_BsD * gate.amax(-1, keepdim=True)


def norm_bias_of_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    """Bug 12, sequence parallel."""
    bias = m.bias if m.is_wrong else m.comm.copy_to_tp(m.bias)
    y = F.layer_norm(x_BsD, (w.WIDTH,), m.comm.copy_to_tp(m.scale), bias)  # fault
    return F.gelu(y)


def keys_gathered_without_their_gradient(m: Any, x_BsD: Tensor) -> Tensor:
    """Bug 13, context parallel: each rank keeps the gradient of its own queries for the keys of all."""
    q, k, v = F.linear(x_BsD, m.comm.copy_to_tp(m.qkv_whole)).chunk(3, -1)
    both = torch.stack((k, v))
    both = m.comm.all_gather(both, dim=2, dst="I" if m.is_wrong else "R")  # fault
    return w.merged(F.scaled_dot_product_attention(w.heads(q), w.heads(both[0]), w.heads(both[1])))


def norm_of_local_heads(m: Any, x: Tensor) -> Tensor:
    """Bug 14: the weight of a norm per head is replicated, and each rank has the gradient of its own w.heads."""
    q, k, v = F.linear(m.comm.copy_to_tp(x), m.qkv).chunk(3, -1)
    weight = m.head_scale if m.is_wrong else m.comm.copy_to_tp(m.head_scale)
    q = F.rms_norm(w.heads(q), (w.HEAD,), weight)  # fault
    o = F.scaled_dot_product_attention(q, w.heads(k), w.heads(v))
    return m.comm.all_reduce(F.linear(w.merged(o), m.out))


SEQUENCE = {"input": 1, "forward": 1}
SILENT = (
    w.Case(log_probabilities, {"table": w.TABLE}, "gradient not summed", sharded={"forward": -1}),
    w.Case(embedding_mask, {"table": w.TABLE}, "masked differently", takes="ids"),
    w.Case(recomputed_with_a_different_input, w.MLP, "other number"),
    w.Case(loss_scaled_by_ranks, {"square": w.SQUARE}, "1 / tp", sharded={"input": 1}),
    w.Case(loss_not_averaged, {"square": w.SQUARE}, "tp times", sharded={"input": 1}),
    w.Case(head_that_is_not_tied, {"table": w.TABLE}, "gradient cut", takes="ids", sharded={"forward": -1}),
    w.Case(scale_of_the_local_maximum, w.MLP, "local statistic"),
    w.Case(update_of_the_own_rows, {"square": w.SQUARE}, "not summed"),
    w.Case(layer_that_is_left_out, {"square": w.SQUARE, "second": w.SQUARE, "third": w.SQUARE}, "left out"),
    w.Case(gradient_of_the_wrong_group, {**w.MLP, "scale": w.SCALE}, "gradient not summed"),
    w.Case(router_of_sharded_tokens, {"router": ((4, w.WIDTH), None)}, "gradient not summed", sharded=SEQUENCE),
    w.Case(norm_bias_of_sharded_tokens, {"scale": w.SCALE, "bias": w.SCALE}, "gradient not summed", sharded=SEQUENCE),
    w.Case(
        keys_gathered_without_their_gradient,
        {"qkv_whole": ((3 * w.WIDTH, w.WIDTH), None)},
        "gradient not summed",
        sharded=SEQUENCE,
    ),
    w.Case(norm_of_local_heads, {"qkv": w.QKV, "out": w.OUT, "head_scale": ((w.HEAD,), None)}, "gradient not summed"),
)
