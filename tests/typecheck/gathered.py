"""Programs that gather, or reduce in place, what each rank found in its own block.

As those of `scaled`, each is its own single-device reference with `comm.size` 1.
"""

# B batch, S sequence, D model width, F hidden width, V vocabulary; lower case is this rank's share
from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from tests.typecheck.scaled import Scaled, partial, reduced_in_place
from tpcompile.collectives import api as collectives

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


# What is merged of the ranks' statistics.


def _norm(m: Any, x: Tensor, order: float) -> Tensor:
    return torch.linalg.vector_norm(_logits(m, x), ord=order, dim=-1, keepdim=True)


def _reduced(m: Any, x: Tensor, op: str) -> Tensor:
    return x if m.comm.size == 1 else collectives.all_reduce(x, group=m.comm.group, op=op)


def norms_by_their_orders(m: Any, x: Tensor) -> Tensor:
    cubes = _reduced(m, _norm(m, x, 3) ** 3, "sum")
    largest, smallest = _reduced(m, _norm(m, x, math.inf), "max"), _reduced(m, _norm(m, x, -math.inf), "min")
    return (
        x
        + cubes ** (1 / 3)
        + largest
        + smallest
        + _reduced(m, torch.norm(_logits(m, x), p=1, dim=-1), "sum")[..., None]
    )


def gathered_norms_of_order_1(m: Any, x: Tensor) -> Tensor:
    return x + torch.linalg.vector_norm(m.comm.all_gather(_norm(m, x, 1), dim=-1, dst="I"), ord=1, dim=-1, keepdim=True)


def norm_of_other_norms(m: Any, x: Tensor) -> Tensor:
    """Lengths by one norm, and their length by a different one."""
    return x + _reduced(m, _norm(m, x, 1) ** 2, "sum").sqrt()


def cubes_of_norms(m: Any, x: Tensor) -> Tensor:
    return x + _reduced(m, _norm(m, x, 2) ** 3, "sum")


def sum_of_norms(m: Any, x: Tensor) -> Tensor:
    return x + _reduced(m, _norm(m, x, 3), "sum")


def smallest_by_negation(m: Any, x: Tensor) -> Tensor:
    least = _logits(m, x).amin(-1, keepdim=True)
    return x - _reduced(m, -least, "max") + _reduced(m, -2.0 * least, "max")


def negated_the_wrong_way(m: Any, x: Tensor) -> Tensor:
    return x - _reduced(m, -_logits(m, x).amax(-1, keepdim=True), "max")


def best_of_equal_values(m: Any, x: Tensor) -> Tensor:
    """Who has the largest value tells its place; an index has no gradient."""
    value, index = _logits(m, x).detach().max(-1)
    best = m.comm.all_max(value)
    place = torch.where(value == best, _global(m, x, index).to(x.dtype), -1.0)
    return x * m.comm.all_max(place).unsqueeze(-1)


def best_of_a_packed_pair(m: Any, x: Tensor) -> Tensor:
    value, index = _logits(m, x).detach().max(-1)
    pairs = torch.stack((value, _global(m, x, index).to(x.dtype)), -1)
    pairs = m.comm.all_gather(pairs[None], dim=0, dst="I")
    return x * pairs[..., 1].gather(0, pairs[..., 0].argmax(0)[None])[0].unsqueeze(-1)


def _softmax_pair(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = _logits(m, x)
    top = logits.detach().amax(-1, keepdim=True)
    return logits, top, (logits - top).exp().sum(-1, keepdim=True)


def softmax_of_gathered_pairs(m: Any, x: Tensor) -> Tensor:
    logits, top, sums = _softmax_pair(m, x)
    tops = m.comm.all_gather(top, dim=-1, dst="I")
    highest = tops.amax(-1, keepdim=True)
    total = (m.comm.all_gather(sums, dim=-1, dst="R") * (tops - highest).exp()).sum(-1, keepdim=True)
    return m.comm.all_reduce(F.linear((logits - highest).exp() / total, m.down))


def softmax_of_a_stacked_pair(m: Any, x: Tensor) -> Tensor:
    logits, top, sums = _softmax_pair(m, x)
    pairs = m.comm.all_gather(torch.stack((top, sums), -1)[None], dim=0, dst="R")
    highest = pairs[..., 0].amax(0)
    total = (pairs[..., 1] * (pairs[..., 0] - highest).exp()).sum(0)
    return m.comm.all_reduce(F.linear((logits - highest).exp() / total, m.down))


def softmax_without_weights(m: Any, x: Tensor) -> Tensor:
    """The sums of the ranks are added, each of which is relative to a maximum of its own."""
    logits, top, sums = _softmax_pair(m, x)
    highest = m.comm.all_gather(top, dim=-1, dst="I").amax(-1, keepdim=True)
    total = m.comm.all_gather(sums, dim=-1, dst="R").sum(-1, keepdim=True)
    return m.comm.all_reduce(F.linear((logits - highest).exp() / total, m.down))


def _moments(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = _logits(m, x)
    mean = logits.mean(-1, keepdim=True)
    return logits, mean, (logits - mean).square().sum(-1, keepdim=True)


def variance_of_merged_moments(m: Any, x: Tensor) -> Tensor:
    """Of the squares around the ranks' means and those of the means, after Chan."""
    logits, mean, squares = _moments(m, x)
    means = m.comm.all_gather(mean, dim=-1, dst="R")
    center = means.mean(-1, keepdim=True)
    between = (means - center).square().sum(-1, keepdim=True) * logits.shape[-1]
    variance = (m.comm.all_reduce(squares, dst="R") + between) / len(m.table) * 4
    return m.comm.all_reduce(F.linear((logits - center) * torch.rsqrt(variance + 1), m.down))


def variance_of_reversed_differences(m: Any, x: Tensor) -> Tensor:
    """A local mean minus the values, whose squares are those of the values minus the mean."""
    logits = _logits(m, x)
    mean = logits.mean(-1, keepdim=True)
    means = m.comm.all_gather(mean, dim=-1, dst="R")
    between = (means - means.mean(-1, keepdim=True)).square().sum(-1, keepdim=True) * logits.shape[-1]
    squares = m.comm.all_reduce((mean - logits).square().sum(-1, keepdim=True), dst="R")
    return m.comm.all_reduce(F.linear(logits * torch.rsqrt(squares + between + 1), m.down))


def variance_around_own_means(m: Any, x: Tensor) -> Tensor:
    logits, _, squares = _moments(m, x)
    variance = m.comm.all_reduce(squares, dst="R") / len(m.table) * 4
    return m.comm.all_reduce(F.linear(logits * torch.rsqrt(variance + 1), m.down))


def totals_of_running_sums(m: Any, x: Tensor) -> Tensor:
    """The last place of a running sum is the total of the shard."""
    sums = _logits(m, x).cumsum(-1)
    totals = m.comm.all_gather(sums[..., -1:], dim=-1, dst="R")
    is_before = torch.arange(m.comm.size) < m.comm.rank_index(x.device)
    before = (totals * is_before.to(x.dtype)).sum(-1, keepdim=True)
    return m.comm.all_reduce(F.linear(sums + before, m.down))


def first_of_running_sums(m: Any, x: Tensor) -> Tensor:
    sums = _logits(m, x).cumsum(-1)
    return m.comm.all_reduce(F.linear(sums + sums[..., :1], m.down))


def sum_of_chosen(m: Any, x: Tensor) -> Tensor:
    """Each rank's largest are added up; what they are is not followed."""
    return x + m.comm.all_reduce(_logits(m, x).topk(2, -1)[0].sum(-1, keepdim=True))


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
    Scaled(norms_by_their_orders),
    Scaled(gathered_norms_of_order_1),
    Scaled(norm_of_other_norms, "local-statistic"),
    Scaled(cubes_of_norms, "local-statistic"),
    Scaled(sum_of_norms, "wrong-reduce-op"),
    Scaled(smallest_by_negation),
    Scaled(negated_the_wrong_way, "wrong-reduce-op"),
    Scaled(best_of_equal_values),
    Scaled(best_of_a_packed_pair, is_complete=False),
    Scaled(softmax_of_gathered_pairs),
    Scaled(softmax_of_a_stacked_pair, is_complete=False),
    Scaled(softmax_without_weights, "local-statistic"),
    Scaled(variance_of_merged_moments),
    Scaled(variance_of_reversed_differences),
    Scaled(variance_around_own_means, "local-statistic"),
    Scaled(totals_of_running_sums, is_complete=False),
    Scaled(first_of_running_sums, "crosses-shards"),
)
