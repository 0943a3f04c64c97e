"""Positions and masks on shards of tokens, tables, losses: modules with a fault, and correct ones.

The line of the fault has the comment `# wrong`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from tests.typecheck.by_hand import Copy, GatherTokens, Reduce
from tests.typecheck.cases import SQUARE, Case
from tests.typecheck.programs import COLUMN, LOCAL, PLAIN, TP, WIDTH


def _turned(x_sBD: Tensor, positions: Tensor) -> Tensor:
    frequencies = 1.0 / 10000 ** (torch.arange(0, WIDTH, 2, device=x_sBD.device).float() / WIDTH)
    angles = torch.outer(positions.float(), frequencies)
    angles = torch.cat((angles, angles), -1)[:, None]
    left, right = x_sBD.chunk(2, -1)
    return x_sBD * angles.cos() + torch.cat((-right, left), -1) * angles.sin()  # wrong


def rotary_local(m: Any, x: Tensor) -> Tensor:
    return _turned(x, torch.arange(x.shape[0], device=x.device))


def rotary_global(m: Any, x: Tensor) -> Tensor:
    own = x.shape[0]
    return _turned(x, torch.arange(own, device=x.device) + m.comm.rank * own)


def rotary_by_bounds(m: Any, x: Tensor) -> Tensor:
    own, rank = x.shape[0], m.comm.rank
    return _turned(x, torch.arange(rank * own, (rank + 1) * own, device=x.device))


def rotary_by_tensor(m: Any, x: Tensor) -> Tensor:
    own = x.shape[0]
    return _turned(x, torch.arange(own, device=x.device) + m.comm.rank_index(x.device) * own)


def rotary_on_whole_tokens(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    angles = torch.arange(x.shape[0], device=x.device)[:, None, None] * 0.1
    return m.comm.all_reduce(F.linear(h * angles.cos(), m.down))


def learned_local(m: Any, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[0], device=x.device)
    return x + F.embedding(places, m.comm.copy_to_tp(m.places))[:, None]  # wrong


def learned_global(m: Any, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[0], device=x.device) + m.comm.rank * x.shape[0]
    return x + F.embedding(places, m.comm.copy_to_tp(m.places))[:, None]


def _scores(m: Any, x_sBD: Tensor) -> tuple[Tensor, Tensor]:
    whole = m.comm.all_gather(x_sBD, dim=0, dst="R").transpose(0, 1)
    return x_sBD.transpose(0, 1) @ whole.transpose(1, 2), whole


def causal_ones(m: Any, x: Tensor) -> Tensor:
    scores, values = _scores(m, x)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
    scores = torch.where(seen, scores, -1e9)  # wrong
    return (scores.softmax(-1) @ values).transpose(0, 1)


def causal_ranges(m: Any, x: Tensor) -> Tensor:
    scores, values = _scores(m, x)
    q, k = (torch.arange(n, device=x.device) for n in scores.shape[-2:])
    scores = scores.masked_fill(k[None] > q[:, None], -1e9)  # wrong
    return (scores.softmax(-1) @ values).transpose(0, 1)


def causal_ranges_moved(m: Any, x: Tensor) -> Tensor:
    scores, values = _scores(m, x)
    q, k = (torch.arange(n, device=x.device) for n in scores.shape[-2:])
    scores = scores.masked_fill(k[None] > q[:, None] + m.comm.rank * x.shape[0], -1e9)
    return (scores.softmax(-1) @ values).transpose(0, 1)


def causal_diagonal(m: Any, x: Tensor) -> Tensor:
    scores, values = _scores(m, x)
    ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device)
    scores = torch.where(ones.tril(m.comm.rank * x.shape[0]), scores, -1e9)
    return (scores.softmax(-1) @ values).transpose(0, 1)


def distances(m: Any, x: Tensor) -> Tensor:
    scores, values = _scores(m, x)
    k = torch.arange(scores.shape[-1], device=x.device)
    scores = scores - 0.1 * k
    return (scores.softmax(-1) @ values).transpose(0, 1)


def own_rows(m: Any, x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    return x[rows] + x.index_select(0, rows)


def _loss(m: Any, x: Tensor, *, masked: bool) -> Tensor:
    """Logits of a shard of the vocabulary, as Megatron-LM has the loss."""
    logits = F.linear(Copy.apply(x, m.comm.group), m.up).flatten(0, 1)
    with torch.no_grad():
        top = logits.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=m.comm.group)
    logits = logits - top[:, None]
    targets = x.detach()[..., 0].long().flatten()
    start = m.comm.rank * LOCAL
    other = (targets < start) | (targets >= start + LOCAL)
    at = (targets - start).masked_fill(other, 0)
    picked = logits[torch.arange(len(logits), device=x.device), at]
    if masked:
        picked = picked.masked_fill(other, 0.0)
    total = Reduce.apply(logits.exp().sum(-1), m.comm.group)
    return (total.log() - Reduce.apply(picked, m.comm.group)).mean()  # wrong


def loss_unmasked(m: Any, x: Tensor) -> Tensor:
    return _loss(m, x, masked=False)


def loss_masked(m: Any, x: Tensor) -> Tensor:
    return _loss(m, x, masked=True)


def softmax_of_shard(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(Copy.apply(x, m.comm.group), m.up)
    return Reduce.apply(F.linear(logits.softmax(-1), m.down), m.comm.group)  # wrong


def wait_forgotten_gradient(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(Copy.apply(x, m.comm.group), m.up)), m.down)
    work = dist.all_reduce(y, group=m.comm.group, async_op=True)  # wrong
    work.wait()
    return x + y


def functional_output(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(Copy.apply(x, m.comm.group), m.up)), m.down)
    y = funcol.all_reduce(y, "sum", m.comm.group)
    return x + y  # wrong


def router_not_copied(m: Any, x: Tensor) -> Tensor:
    weights = F.linear(x, m.square).softmax(-1)
    y = F.linear(F.gelu(F.linear(Copy.apply(x, m.comm.group), m.up)), m.down)
    return Reduce.apply(y * weights, m.comm.group)  # wrong


def router_copied(m: Any, x: Tensor) -> Tensor:
    weights = Copy.apply(F.linear(x, m.square).softmax(-1), m.comm.group)
    y = F.linear(F.gelu(F.linear(Copy.apply(x, m.comm.group), m.up)), m.down)
    return Reduce.apply(y * weights, m.comm.group)


def mean_of_tokens(m: Any, x_sBD: Tensor) -> Tensor:
    return x_sBD - x_sBD.mean(0)  # wrong


def gathered_mean(m: Any, x_sBD: Tensor) -> Tensor:
    return x_sBD - GatherTokens.apply(x_sBD, m.comm.group).mean(0)


def best_of_shard(m: Any, x: Tensor) -> Tensor:
    best = F.linear(Copy.apply(x, m.comm.group), m.up).argmax(-1)
    return x + F.embedding(best, m.vocabulary)  # wrong


PLACES = {"places": ((64, WIDTH), None)}
TOKENS = ("V(0)", "V(0)")
BROKEN = (
    Case(rotary_local, {}, *TOKENS),
    Case(learned_local, PLACES, *TOKENS),
    Case(causal_ones, {}, *TOKENS),
    Case(causal_ranges, {}, *TOKENS),
    Case(loss_unmasked, {"up": COLUMN}),
    Case(softmax_of_shard, PLAIN),
    Case(wait_forgotten_gradient, PLAIN),
    Case(functional_output, PLAIN),
    Case(router_not_copied, PLAIN | {"square": SQUARE}),
    Case(mean_of_tokens, {}, *TOKENS),
    Case(best_of_shard, {"up": COLUMN, "vocabulary": ((TP * LOCAL, WIDTH), None)}),
)
CORRECT = (
    Case(rotary_global, {}, *TOKENS),
    Case(rotary_by_bounds, {}, *TOKENS),
    Case(rotary_by_tensor, {}, *TOKENS),
    Case(rotary_on_whole_tokens, PLAIN),
    Case(learned_global, PLACES, *TOKENS),
    Case(causal_ranges_moved, {}, *TOKENS),
    Case(causal_diagonal, {}, *TOKENS),
    Case(distances, {}, *TOKENS),
    Case(own_rows, {}, *TOKENS),
    Case(loss_masked, {"up": COLUMN}),
    Case(router_copied, PLAIN | {"square": SQUARE}),
    Case(gathered_mean, {}, *TOKENS),
)
