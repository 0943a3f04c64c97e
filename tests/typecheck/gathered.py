"""Programs that gather, or reduce in place, what each rank found in its own block.

As those of `scaled`, each is its own single-device reference with `comm.size` 1.
"""

# B batch, S sequence, D model width, F hidden width, V vocabulary; lower case is this rank's share
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from tests.typecheck.scaled import Scaled, partial, reduced_in_place

# What each rank found in its own block.


def _logits(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.comm.copy_to_tp(x), m.up)


def _functional_gather(m: Any, x: Tensor, dim: int) -> Tensor:
    return x if m.comm.size == 1 else funcol.all_gather_tensor(x, gather_dim=dim, group=m.comm.group)


def _global(m: Any, x: Tensor, index: Tensor) -> Tensor:
    return index + m.comm.rank_index(x.device) * m.up.shape[0]


def _token(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.embedding(ids, m.table)


def best_of_shards(m: Any, x: Tensor) -> Tensor:
    value, index = _logits(m, x).detach().max(-1, keepdim=True)
    values = m.comm.all_gather(value, dim=-1, dst="I")
    ids = m.comm.all_gather(_global(m, x, index), dim=-1, dst="I")
    return _token(m, x, ids.gather(-1, values.argmax(-1, keepdim=True)).squeeze(-1))


def functional_best_of_shards(m: Any, x: Tensor) -> Tensor:
    value, index = _logits(m, x).detach().max(-1, keepdim=True)
    values, ids = _functional_gather(m, value, 2), _functional_gather(m, _global(m, x, index), 2)
    return _token(m, x, ids.gather(-1, values.argmax(-1, keepdim=True)).squeeze(-1))


def stacked_best_of_shards(m: Any, x: Tensor) -> Tensor:
    """Gathered along a new dim in front, so that the blocks are of dim 0."""
    value, index = _logits(m, x).detach().max(-1)
    values, ids = _functional_gather(m, value[None], 0), _functional_gather(m, _global(m, x, index)[None], 0)
    return _token(m, x, ids.gather(0, values.argmax(0, keepdim=True)).squeeze(0))


def best_of_shards_in_a_buffer(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        value, index = _logits(m, x).max(-1)
        index = _global(m, x, index)
        values, ids = (t.new_empty(m.comm.size * len(t), *t.shape[1:]) for t in (value, index))
        if m.comm.size == 1:
            values, ids = value, index
        else:
            dist.all_gather_into_tensor(values, value.contiguous(), group=m.comm.group)
            dist.all_gather_into_tensor(ids, index.contiguous(), group=m.comm.group)
        values, ids = (t.unflatten(0, (m.comm.size, -1)) for t in (values, ids))
        winner = ids.gather(0, values.argmax(0, keepdim=True)).squeeze(0)
    return _token(m, x, winner)


def worst_of_shards(m: Any, x: Tensor) -> Tensor:
    values = m.comm.all_gather(_logits(m, x).amin(-1, keepdim=True), dim=-1, dst="I")
    lowest, _ = values.min(-1, keepdim=True)
    return x + lowest


def sorted_maxima(m: Any, x: Tensor) -> Tensor:
    """The largest of the largest, by a sort and by topk."""
    values = m.comm.all_gather(_logits(m, x).amax(-1, keepdim=True), dim=-1, dst="I")
    return x + values.sort(-1, descending=True)[0][..., :1] + values.topk(1, -1)[0]


def pairwise_maxima(m: Any, x: Tensor) -> Tensor:
    values = m.comm.all_gather(_logits(m, x).amax(-1, keepdim=True), dim=-1, dst="I")
    top, *others = values.unbind(-1)
    for other in others:
        top = torch.maximum(top, other)
    return x + top.unsqueeze(-1)


def merged_log_sums(m: Any, x: Tensor) -> Tensor:
    parts = m.comm.all_gather(_logits(m, x).logsumexp(-1, keepdim=True), dim=-1, dst="I")
    return x - parts.logsumexp(-1, keepdim=True)


def merged_softmax_sums(m: Any, x: Tensor) -> Tensor:
    """Maxima and sums of exponentials are gathered, and merged by the maxima."""
    logits = _logits(m, x)
    top = logits.detach().amax(-1, keepdim=True)
    sums = m.comm.all_gather((logits - top).exp().sum(-1, keepdim=True), dim=-1, dst="I")
    tops = m.comm.all_gather(top, dim=-1, dst="I")
    highest = tops.amax(-1, keepdim=True)
    return x - (sums * (tops - highest).exp()).sum(-1, keepdim=True).log() - highest


def gathered_squares(m: Any, x: Tensor) -> Tensor:
    parts = m.comm.all_gather(_logits(m, x).square().sum(-1, keepdim=True), dim=-1, dst="I")
    return x / (1 + parts.sum(-1, keepdim=True).sqrt())


def gathered_norms(m: Any, x: Tensor) -> Tensor:
    parts = m.comm.all_gather(_logits(m, x).norm(dim=-1, keepdim=True), dim=-1, dst="I")
    return x / (1 + parts.norm(dim=-1, keepdim=True))


def gathered_means(m: Any, x: Tensor) -> Tensor:
    parts = m.comm.all_gather(_logits(m, x).mean(-1, keepdim=True), dim=-1, dst="I")
    return x - parts.sum(-1, keepdim=True) / m.comm.size


def gathered_flags(m: Any, x: Tensor) -> Tensor:
    """Whether any logit is above a threshold."""
    found = (_logits(m, x).detach() > 1).any(-1, keepdim=True).to(x.dtype)
    return x * (1 + m.comm.all_gather(found, dim=-1, dst="I").amax(-1, keepdim=True))


def gathered_summands(m: Any, x: Tensor) -> Tensor:
    """A reduce by hand: partial sums are gathered and added up."""
    parts = m.comm.all_gather(partial(m, x).unsqueeze(0), dim=0, dst="I")
    return x + parts.sum(0) + m.bias


def functional_gathered_summands(m: Any, x: Tensor) -> Tensor:
    parts = _functional_gather(m, partial(m, x), 2).unflatten(-1, (m.comm.size, -1))
    return m.comm.all_reduce(F.linear(F.gelu(F.linear(parts.sum(-2), m.up)), m.down))


def two_best_of_shards(m: Any, x: Tensor) -> Tensor:
    values, index = _logits(m, x).detach().topk(2, -1)
    values = m.comm.all_gather(values, dim=-1, dst="I")
    ids = m.comm.all_gather(_global(m, x, index), dim=-1, dst="I")
    best = ids.gather(-1, values.topk(2, -1)[1])
    return _token(m, x, best[..., 0]) + F.embedding(best[..., 1], m.table)


def best_of_masked_shards(m: Any, x: Tensor) -> Tensor:
    value, index = _logits(m, x).detach().max(-1, keepdim=True)
    values = m.comm.all_gather(value, dim=-1, dst="I")
    ids = m.comm.all_gather(_global(m, x, index), dim=-1, dst="I")
    is_best = values == values.amax(-1, keepdim=True)
    return _token(m, x, torch.where(is_best, ids, 0).amax(-1))


def summed_before(m: Any, x: Tensor) -> Tensor:
    """A running sum along the shard, plus what the ranks before have, taken by a slice."""
    h = _logits(m, x)
    totals = m.comm.all_gather(h.sum(-1, keepdim=True), dim=-1, dst="R")
    before = totals[..., : m.comm.rank].sum(-1, keepdim=True)
    return m.comm.all_reduce(F.linear(h.cumsum(-1) + before, m.down))


def own_maximum(m: Any, x: Tensor) -> Tensor:
    """The maximum of the own block, for that of the whole."""
    logits = _logits(m, x)
    h = (logits - logits.amax(-1, keepdim=True)).exp()
    return m.comm.all_reduce(F.linear(h, m.down))


def returned_maximum(m: Any, x: Tensor) -> Tensor:
    return x + _logits(m, x).amax(-1, keepdim=True)


def largest_summand(m: Any, x: Tensor) -> Tensor:
    """A decision by partial sums."""
    parts = m.comm.all_gather(partial(m, x).detach().unsqueeze(0), dim=0, dst="I")
    return _token(m, x, parts.amax(0).argmax(-1) + parts.argmax(0)[..., 0])


def first_summand(m: Any, x: Tensor) -> Tensor:
    parts = m.comm.all_gather(partial(m, x), dim=-1, dst="I")
    return x + parts[..., : x.shape[-1]]


def sum_of_maxima(m: Any, x: Tensor) -> Tensor:
    """The maxima are added up where the largest is meant."""
    value = _logits(m, x).amax(-1, keepdim=True)
    return x + m.comm.all_reduce(value)


def largest_in_place(m: Any, x: Tensor) -> Tensor:
    top = reduced_in_place(m, _logits(m, x).detach().amax(-1, keepdim=True), dist.ReduceOp.MAX)
    return m.comm.all_reduce(partial(m, x)) + reduced_in_place(m, top, dist.ReduceOp.MAX)


def largest_added_in_place(m: Any, x: Tensor) -> Tensor:
    """The ranks' maxima are added up."""
    top = _logits(m, x).detach().amax(-1, keepdim=True)
    return m.comm.all_reduce(partial(m, x)) + reduced_in_place(m, top, dist.ReduceOp.SUM)


PROGRAMS = (
    Scaled(best_of_shards),
    Scaled(functional_best_of_shards),
    Scaled(stacked_best_of_shards),
    Scaled(best_of_shards_in_a_buffer, is_complete=False),
    Scaled(worst_of_shards),
    Scaled(sorted_maxima),
    Scaled(pairwise_maxima, is_complete=False),
    Scaled(merged_log_sums),
    Scaled(merged_softmax_sums),
    Scaled(gathered_squares),
    Scaled(gathered_norms),
    Scaled(gathered_means, is_complete=False),
    Scaled(gathered_flags, is_complete=False),
    Scaled(gathered_summands),
    Scaled(functional_gathered_summands, is_complete=False),
    Scaled(two_best_of_shards),
    Scaled(best_of_masked_shards, is_complete=False),
    Scaled(summed_before, is_complete=False),
    Scaled(own_maximum, "local-statistic"),
    Scaled(returned_maximum, "local-statistic"),
    Scaled(largest_summand, "partial-used-as-whole"),
    Scaled(first_summand, "partial-used-as-whole"),
    Scaled(sum_of_maxima, "wrong-reduce-op"),
    Scaled(largest_in_place),
    Scaled(largest_added_in_place, "wrong-reduce-op"),
)
