"""Held-out programs with wrong numbers, written before the search was extended: it was designed with them in mind.

The line to blame has the comment `# fault`.
"""

# Letters of shapes: see wrong_programs.py
from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from tests.numerics import wrong_programs as w
from tpcompile.collectives import api as collectives


def bias_in_the_row_linear(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(F.linear(m.comm.copy_to_tp(x), m.up))
    if m.is_wrong:
        return x + m.comm.all_reduce(F.linear(h, m.down, m.bias))  # fault
    return x + m.comm.all_reduce(F.linear(h, m.down)) + m.bias


def attention_branch_without_sum(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(m.comm.copy_to_tp(x), m.qkv).chunk(3, -1)
    o = w.merged(F.scaled_dot_product_attention(w.heads(q), w.heads(k), w.heads(v)))
    y = F.linear(o, m.out)  # fault
    if not m.is_wrong:
        y = m.comm.all_reduce(y)
    return F.rms_norm(x + y, (w.WIDTH,))


def norm_of_the_local_queries(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(m.comm.copy_to_tp(x), m.qkv).chunk(3, -1)
    if m.is_wrong:
        mean = q.square().mean(-1, keepdim=True)  # fault
    else:
        mean = m.comm.all_reduce(q.square().sum(-1, keepdim=True), dst="R") / w.WIDTH
    q = q * torch.rsqrt(mean + 1e-6)
    o = w.merged(F.scaled_dot_product_attention(w.heads(q), w.heads(k), w.heads(v)))
    return m.comm.all_reduce(F.linear(o, m.out))


def output_reduced_twice(m: Any, x: Tensor) -> Tensor:
    y = m.comm.all_reduce(F.linear(F.silu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down))
    if m.is_wrong:
        y = m.comm.all_reduce(y)  # fault
    return torch.tanh(y) + x


def embedding_that_takes_a_row_too_many(m: Any, ids: Tensor) -> Tensor:
    size = len(m.table)
    own, found = w.is_own(m, ids, size)
    if m.is_wrong:
        found = found | (ids == (m.comm.rank + 1) * size)  # fault
    y = torch.where(found.unsqueeze(-1), F.embedding(own, m.table), 0.0)
    return F.linear(m.comm.all_reduce(y), m.square)


def column_linear_without_entry(m: Any, x: Tensor) -> Tensor:
    x = F.layer_norm(x, (w.WIDTH,), m.scale)
    h = F.linear(x if m.is_wrong else m.comm.copy_to_tp(x), m.up)  # fault
    return m.comm.all_reduce(F.linear(F.gelu(h), m.down))


def average_for_a_sum(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    op = "avg" if m.is_wrong else "sum"
    y = collectives.all_reduce(y, op=op, group=m.comm.group, dst="I") if m.comm.size > 1 else y  # fault
    return F.rms_norm(x + y, (w.WIDTH,))


def heads_gathered_in_the_wrong_order(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    if m.is_wrong:
        full = m.comm.all_gather(h.unsqueeze(-1), dim=-1, dst="I").flatten(-2)  # fault
    else:
        full = m.comm.all_gather(h, dim=-1, dst="I")
    return F.linear(F.gelu(full), m.mix)


def loss_of_local_means(m: Any, x_BsD: Tensor) -> Tensor:
    y = F.linear(x_BsD, m.comm.copy_to_tp(m.square)).square()
    if m.is_wrong:
        return m.comm.all_reduce(y.mean())  # fault
    return m.comm.all_reduce(y.sum()) / (y.numel() * m.comm.size)


def norm_weight_of_sharded_tokens(m: Any, x_BsD: Tensor) -> Tensor:
    scale = m.scale if m.is_wrong else m.comm.copy_to_tp(m.scale)
    y = F.rms_norm(x_BsD, (w.WIDTH,)) * scale  # fault
    full = m.comm.all_gather(y, dim=1, dst="R")
    return m.comm.all_reduce(F.linear(F.gelu(F.linear(full, m.up)), m.down))


def positions_that_begin_anew(m: Any, x_BsD: Tensor) -> Tensor:
    start = 0 if m.is_wrong else m.comm.rank * x_BsD.shape[1]
    position = torch.arange(start, start + x_BsD.shape[1], dtype=x_BsD.dtype)  # fault
    y = x_BsD * torch.cos(position * 0.3).unsqueeze(-1)
    return F.linear(y, m.comm.copy_to_tp(m.square))


def softmax_over_the_local_vocabulary(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(m.comm.copy_to_tp(x), m.table)
    if m.is_wrong:
        p = logits.softmax(-1)  # fault
    else:
        top = collectives.all_reduce(logits.detach().amax(-1, keepdim=True), op="max", group=m.comm.group) \
            if m.comm.size > 1 else logits.detach().amax(-1, keepdim=True)  # fmt: skip
        e = (logits - top).exp()
        p = e / m.comm.all_reduce(e.sum(-1, keepdim=True), dst="R")
    return m.comm.all_gather(p, dim=-1, dst="I")


def row_linear_with_torchs_sum(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    if m.is_wrong:
        return x + funcol.all_reduce(y, "sum", m.comm.group)  # fault
    return x + m.comm.all_reduce(y)


def expert_weighted_as_the_first(m: Any, x: Tensor) -> Tensor:
    """Expert e is features e of up and down; router [experts, D]."""
    p = m.comm.copy_to_tp(F.linear(x, m.router).softmax(-1))
    h = F.gelu(F.linear(m.comm.copy_to_tp(x), m.up))
    weights = p.repeat_interleave(h.shape[-1] * m.comm.size // p.shape[-1], -1)
    start = 0 if m.is_wrong else m.comm.rank * h.shape[-1]
    own = weights[..., start : start + h.shape[-1]]  # fault
    return m.comm.all_reduce(F.linear(h * own, m.down))


def scores_scaled_by_local_width(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(m.comm.copy_to_tp(x), m.qkv).chunk(3, -1)
    width = q.shape[-1] if m.is_wrong else q.shape[-1] * m.comm.size
    q = q / width**0.5  # fault
    o = (w.heads(q) @ w.heads(k).transpose(-1, -2)).softmax(-1) @ w.heads(v)
    return m.comm.all_reduce(F.linear(w.merged(o), m.out))


def detached_entry(m: Any, x: Tensor) -> Tensor:
    """The gradient of the skip path is there; that of the branch is cut."""
    entered = m.comm.copy_to_tp(x * m.scale)
    h = F.linear(entered.detach() if m.is_wrong else entered, m.up)  # fault
    return x + m.comm.all_reduce(F.linear(F.gelu(h), m.down))


HELD_OUT = (
    w.Case(bias_in_the_row_linear, {**w.MLP, "bias": w.SCALE}, "counted per rank"),
    w.Case(attention_branch_without_sum, {"qkv": w.QKV, "out": w.OUT}, "not summed"),
    w.Case(norm_of_the_local_queries, {"qkv": w.QKV, "out": w.OUT}, "local statistic"),
    w.Case(output_reduced_twice, w.MLP, "tp times"),
    w.Case(
        embedding_that_takes_a_row_too_many, {"table": w.TABLE, "square": w.SQUARE}, "masked differently", takes="ids"
    ),
    w.Case(column_linear_without_entry, {**w.MLP, "scale": w.SCALE}, "gradient not summed"),
    w.Case(average_for_a_sum, w.MLP, "1 / tp"),
    w.Case(heads_gathered_in_the_wrong_order, {"up": w.UP, "mix": ((w.WIDTH, 32), None)}, "different order"),
    w.Case(loss_of_local_means, {"square": w.SQUARE}, "tp times", sharded={"input": 1}),
    w.Case(norm_weight_of_sharded_tokens, {**w.MLP, "scale": w.SCALE}, "gradient not summed", sharded={"input": 1}),
    w.Case(
        positions_that_begin_anew,
        {"square": w.SQUARE},
        "part of a different rank",
        sharded={"input": 1, "forward": 1},
    ),
    w.Case(softmax_over_the_local_vocabulary, {"table": w.TABLE}, "local statistic"),
    w.Case(row_linear_with_torchs_sum, w.MLP, "tp times"),
    w.Case(expert_weighted_as_the_first, {**w.MLP, "router": ((4, w.WIDTH), None)}, "part of a different rank"),
    w.Case(scores_scaled_by_local_width, {"qkv": w.QKV, "out": w.OUT}, "other number"),
    w.Case(detached_entry, {**w.MLP, "scale": w.SCALE}, "gradient cut"),
)
