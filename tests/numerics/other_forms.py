"""Programs with wrong numbers whose reference is written with other ops: one for what the ranks make with many."""

# B batch, S sequence, D model width, V vocabulary, N experts; lower case is this rank's part
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.numerics import wrong_programs as w
from tpcompile import collectives


def _targets(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) * 7 % w.VOCABULARY


def _maximum(m: Any, x: Tensor) -> Tensor:
    return collectives.all_reduce(x, op="max", group=m.comm.group)


def _cross_entropy(
    m: Any, x: Tensor, *, sums_target: bool = True, shares_maximum: bool = True, smoothing: float = 0.0, number: int = 1
) -> Tensor:
    """`number`: of the ranks over which the mean of the logits is taken."""
    logits_BSv = F.linear(m.comm.copy_to_tp(x), m.table)
    if m.comm.size == 1:
        return F.cross_entropy(logits_BSv.flatten(0, 1), _targets(x).flatten(), label_smoothing=smoothing)
    top_BS = logits_BSv.detach().amax(-1)  # fault: top
    if shares_maximum:
        top_BS = _maximum(m, top_BS)
    total_BS = m.comm.all_reduce((logits_BSv - top_BS.unsqueeze(-1)).exp().sum(-1))
    own, found = w.is_own(m, _targets(x), len(m.table))
    picked_BS = logits_BSv.gather(-1, own.unsqueeze(-1)).squeeze(-1)
    target_BS = torch.where(found, picked_BS, torch.zeros_like(picked_BS))  # fault: target
    if sums_target:
        target_BS = m.comm.all_reduce(target_BS)
    if smoothing:
        mean_BS = m.comm.all_reduce(logits_BSv.mean(-1) / number)  # fault: mean
        target_BS = (1 - smoothing) * target_BS + smoothing * mean_BS
    return (total_BS.log() + top_BS - target_BS).mean()


def target_of_the_own_vocabulary(m: Any, x: Tensor) -> Tensor:
    return _cross_entropy(m, x, sums_target=not m.is_wrong)


def maximum_of_the_own_vocabulary(m: Any, x: Tensor) -> Tensor:
    return _cross_entropy(m, x, shares_maximum=not m.is_wrong)


def mean_of_the_means_of_shards(m: Any, x: Tensor) -> Tensor:
    """The labels of other words have a share of the mean over the vocabulary, which is summed over the ranks."""
    return _cross_entropy(m, x, smoothing=0.1, number=1 if m.is_wrong else m.comm.size)


def slopes_of_the_first_heads(m: Any, x: Tensor) -> Tensor:
    """Attention with linear biases, whose slopes belong to the heads of all ranks."""
    h_BSD = m.comm.copy_to_tp(x)
    q_BhSE, k_BhSE, v_BhSE = (w.heads(F.linear(h_BSD, weight)) for weight in (m.q, m.k, m.v))
    num_heads = q_BhSE.shape[1]
    first = 0 if m.is_wrong else m.comm.rank * num_heads
    heads_h = torch.arange(first, first + num_heads) + 1.0  # fault: slopes
    places_S = torch.arange(x.shape[1])
    apart_SS = (places_S[:, None] - places_S).abs()
    bias_hSS = -(2.0**-heads_h)[:, None, None].to(x.dtype) * apart_SS
    if m.comm.size == 1:
        y_BhSE = F.scaled_dot_product_attention(q_BhSE, k_BhSE, v_BhSE, attn_mask=bias_hSS)
    else:
        y_BhSE = (q_BhSE @ k_BhSE.mT * w.HEAD**-0.5 + bias_hSS).softmax(-1) @ v_BhSE
    return m.comm.all_reduce(F.linear(w.merged(y_BhSE), m.out))


def norm_without_its_gradient(m: Any, x: Tensor) -> Tensor:
    """RMSNorm of sharded features."""
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    if m.comm.size == 1:
        return F.linear(F.rms_norm(h, (w.HIDDEN,), eps=1e-6), m.down)
    with torch.set_grad_enabled(not m.is_wrong):  # fault: gradient
        mean = m.comm.all_reduce(h.square().sum(-1, keepdim=True), dst="R") / w.HIDDEN
    return m.comm.all_reduce(F.linear(h * (mean + 1e-6).rsqrt(), m.down))


def sum_of_what_is_rounded(m: Any, x: Tensor) -> Tensor:
    """Half of the bytes are sent."""
    y = F.linear(F.linear(m.comm.copy_to_tp(x), m.up).relu(), m.down)
    sent = y.to(torch.bfloat16) if m.is_wrong else y  # fault: rounded
    return m.comm.all_reduce(sent).to(y.dtype)


def _summed(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(x)


def _row_parallel(m: Any, x: Tensor) -> Tensor:
    return _summed(m, F.linear(x, m.down))


def sum_of_what_is_summed(m: Any, x: Tensor) -> Tensor:
    """The line of the helper is right in other calls."""
    y = _row_parallel(m, F.linear(m.comm.copy_to_tp(x), m.up).relu())
    if m.is_wrong:
        y = _summed(m, y)  # fault: twice
    return torch.tanh(y)


def whole_rows_beside_a_part(m: Any, x: Tensor) -> Tensor:
    """As a cache that is spread over the ranks, to which each of them adds the new token."""
    if m.is_wrong or m.comm.size == 1:
        rows = torch.cat((m.table, m.square))  # fault
        return x * m.comm.all_reduce(rows.exp().sum(0))
    return x * (m.comm.all_reduce(m.table.exp().sum(0)) + m.square.exp().sum(0))


def signs_of_what_is_too_large(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The second result is right, whatever it was made of."""
    y = m.comm.all_reduce(F.linear(F.linear(m.comm.copy_to_tp(x), m.up).relu(), m.down))
    y = y * (1.5 if m.is_wrong else 1.0)  # fault: signs
    return y, y.sign().abs()


def adapter_scaled_by_its_part(m: Any, x: Tensor) -> Tensor:
    """In two layers: what repairs one of them leaves the other."""
    for _ in range(2):
        if m.comm.size == 1:
            x = torch.tanh(F.linear(x, torch.eye(w.WIDTH).to(x) + m.down @ m.up))
        else:
            added = m.comm.all_reduce(F.linear(F.linear(m.comm.copy_to_tp(x), m.up), m.down))  # fault: adapter
            x = torch.tanh(x + added * (m.comm.size if m.is_wrong else 1))
    return x


def weights_of_the_own_experts(m: Any, x: Tensor) -> Tensor:
    """Router probabilities in one softmax, or by hand over the experts of all ranks."""
    scores_BSn = F.linear(m.comm.copy_to_tp(x), m.table)
    if m.comm.size == 1:
        return F.linear(scores_BSn.softmax(-1), m.values.T)
    shifted = (scores_BSn - _maximum(m, scores_BSn.detach().amax(-1, keepdim=True))).exp()
    total = shifted.sum(-1, keepdim=True)  # fault: experts
    if not m.is_wrong:
        total = m.comm.all_reduce(total, dst="R")
    return m.comm.all_reduce(F.linear(shifted / total, m.values.T))


def variance_of_the_own_features(m: Any, x: Tensor) -> Tensor:
    """LayerNorm of sharded features."""
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    if m.comm.size == 1:
        return F.linear(F.layer_norm(h, (w.HIDDEN,)), m.down)
    mean = m.comm.all_reduce(h.mean(-1, keepdim=True), dst="R") / m.comm.size
    square = (h - mean).pow(2).mean(-1, keepdim=True)  # fault: variance
    if not m.is_wrong:
        square = m.comm.all_reduce(square, dst="R") / m.comm.size
    return m.comm.all_reduce(F.linear((h - mean) * (square + 1e-5).rsqrt(), m.down))


def logarithm_of_the_own_sum(m: Any, x: Tensor) -> Tensor:
    """The maximum is a statistic of the shard, which is combined at once: it is not the mistake."""
    scores_BSv = F.linear(m.comm.copy_to_tp(x), m.table)
    if m.comm.size == 1:
        return scores_BSv.logsumexp(-1)
    top_BS = _maximum(m, scores_BSv.detach().amax(-1))
    total_BS = (scores_BSv - top_BS.unsqueeze(-1)).exp().sum(-1)  # fault: logarithm
    if not m.is_wrong:
        total_BS = m.comm.all_reduce(total_BS)
    return total_BS.log() + top_BS


def shares_of_the_own_experts(m: Any, x: Tensor) -> Tensor:
    """Weights that add up to one, over the experts of this rank."""
    gates_BSn = F.linear(m.comm.copy_to_tp(x), m.table).relu()
    if m.comm.size == 1:
        return F.linear(F.normalize(gates_BSn, p=1, dim=-1), m.values.T)
    total_BS1 = gates_BSn.sum(-1, keepdim=True)  # fault: shares
    if not m.is_wrong:
        total_BS1 = m.comm.all_reduce(total_BS1, dst="R")
    return m.comm.all_reduce(F.linear(gates_BSn / total_BS1.clamp_min(1e-12), m.values.T))


def loss_of_shared_scores(m: Any, x: Tensor) -> Tensor:
    """A loss that all ranks compute alike, of what is shared for their own parts: its gradient is summed, too."""
    scores = F.linear(x, m.scores)
    shared = m.comm.copy_to_tp(scores)
    loss = (shared if m.is_wrong else scores).logsumexp(-1).square().mean()  # fault: shared
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    return m.comm.all_reduce(y * shared.softmax(-1)[..., :1]) + loss


def weight_gathered_along_the_wrong_dim(m: Any, x: Tensor) -> Tensor:
    """The whole weight of its columns, whose size alone is used: all of its numbers are there."""
    whole = m.comm.all_gather(m.out, dim=0 if m.is_wrong else 1, dst="I")  # fault: gathered
    return x * (whole @ whole.T).square().sum().rsqrt()


_EXPERTS = {"table": w.TABLE, "values": w.TABLE}
_ATTENTION = {name: ((w.WIDTH, w.WIDTH), 0) for name in ("q", "k", "v")} | {"out": w.OUT}
OTHER_FORMS = (
    w.Case(target_of_the_own_vocabulary, {"table": w.TABLE}, "not summed", mark="fault: target"),
    w.Case(maximum_of_the_own_vocabulary, {"table": w.TABLE}, "local statistic", mark="fault: top"),
    w.Case(weights_of_the_own_experts, _EXPERTS, "not summed", mark="fault: experts"),
    w.Case(logarithm_of_the_own_sum, {"table": w.TABLE}, "not summed", mark="fault: logarithm"),
    w.Case(shares_of_the_own_experts, _EXPERTS, "not summed", mark="fault: shares"),
    w.Case(variance_of_the_own_features, w.MLP, "local statistic", mark="fault: variance"),
    w.Case(loss_of_shared_scores, w.MLP | {"scores": ((4, w.WIDTH), None)}, "counted per rank", mark="fault: shared"),
    w.Case(weight_gathered_along_the_wrong_dim, {"out": w.OUT}, "different order", mark="fault: gathered"),
    w.Case(whole_rows_beside_a_part, {"table": w.TABLE, "square": w.SQUARE}, "counted per rank"),
    w.Case(signs_of_what_is_too_large, w.MLP, "other number", mark="fault: signs"),
    w.Case(adapter_scaled_by_its_part, w.MLP, "tp times", mark="fault: adapter"),
    w.Case(sum_of_what_is_summed, w.MLP, "tp times", mark="fault: twice"),
    w.Case(mean_of_the_means_of_shards, {"table": w.TABLE}, "tp times", mark="fault: mean"),
    w.Case(slopes_of_the_first_heads, _ATTENTION, "part of a different rank", mark="fault: slopes"),
    w.Case(norm_without_its_gradient, w.MLP, "gradient cut", mark="fault: gradient"),
    w.Case(sum_of_what_is_rounded, w.MLP, "coarser dtype", mark="fault: rounded"),
)
