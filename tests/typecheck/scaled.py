"""Programs that add a share of a replicated tensor on every rank.

Each runs with a group of any size; with `comm.size` 1 it is its own single-device reference.
"""

# B batch, S sequence, D model width, F hidden width, V vocabulary; lower case is this rank's share
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpcompile.collectives import api as collectives


@dataclass(frozen=True)
class Scaled:
    """A program, and what the check has to say of it: a rule, or nothing; unless numbers cannot tell."""

    forward: Callable[..., Tensor]
    rule: str = ""
    is_complete: bool = True
    """Every op is judged."""


SHARE, COUNTED, ON_SOME = "gradient-of-a-share", "bias-before-reduce", "on-some-ranks"


# Shares of a replicated tensor.


def _hidden(m: Any, x: Tensor) -> Tensor:
    return F.gelu(F.linear(m.comm.copy_to_tp(x), m.up))


def partial(m: Any, x: Tensor) -> Tensor:
    return F.linear(_hidden(m, x), m.down)


def divided_bias(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + m.bias / m.comm.size)


def divided_bias_of_a_linear(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(F.linear(_hidden(m, x), m.down, m.bias / m.comm.size))


def bias_times_a_reciprocal(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + m.bias * (1 / m.comm.size))


def bias_divided_by_a_tensor(m: Any, x: Tensor) -> Tensor:
    ranks = torch.tensor(m.comm.size, dtype=x.dtype)
    return m.comm.all_reduce(partial(m, x) + torch.div(m.bias, ranks))


def bias_with_alpha(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(torch.add(partial(m, x), m.bias, alpha=1 / m.comm.size))


def bias_with_beta(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x).flatten(0, 1)
    y = torch.addmm(m.bias, h, m.down.t(), beta=1 / m.comm.size)
    return m.comm.all_reduce(y).view_as(x)


def divided_bias_that_stays_inside(m: Any, x: Tensor) -> Tensor:
    """Reduced with dst="R", and read by work that differs per rank."""
    y = m.comm.all_reduce(partial(m, x) + m.bias / m.comm.size, dst="R")
    return m.comm.all_reduce(F.linear(F.gelu(F.linear(y, m.up)), m.down))


def divided_residual(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + x / m.comm.size)


def divided_linear_of_replicated_weights(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + F.linear(x / m.comm.size, m.square))


def divided_bias_of_a_view(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) - (-m.bias.view(1, 1, -1) / m.comm.size).expand_as(x))


def divided_sum_of_two(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + (m.bias + x) / m.comm.size)


def mean_of_a_replicated_loss(m: Any, x: Tensor) -> Tensor:
    """Averages a loss that all ranks have, with a gradient."""
    loss = (F.linear(x, m.square) + m.bias).square().mean()
    return m.comm.all_reduce(loss / m.comm.size)


def masked_bias(m: Any, x: Tensor) -> Tensor:
    """Added on rank 0 alone, which alone gets its gradient."""
    is_first = m.comm.rank_index(x.device) == 0
    return m.comm.all_reduce(partial(m, x) + torch.where(is_first, m.bias, 0.0))


def _on_the_first_rank(m: Any, bias: Tensor) -> Tensor | None:
    return bias if m.comm.rank == 0 else None


def bias_of_the_first_rank(m: Any, x: Tensor) -> Tensor:
    """As inference engines fuse it, by the rank as a number."""
    return m.comm.all_reduce(F.linear(_hidden(m, x), m.down, _on_the_first_rank(m, m.bias)))


def entered_bias_of_the_first_rank(m: Any, x: Tensor) -> Tensor:
    """In the backward, the all-reduce of copy_to_tp runs on the first rank alone."""
    bias = _on_the_first_rank(m, m.comm.copy_to_tp(m.bias))
    return m.comm.all_reduce(F.linear(_hidden(m, x), m.down, bias))


def entered_bias_of_every_rank(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(F.linear(_hidden(m, x), m.down, m.comm.copy_to_tp(m.bias)))


def bias_on_every_rank(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + m.bias)


def weighted_residual_on_every_rank(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + 0.7 * x)


def bias_and_its_share(m: Any, x: Tensor) -> Tensor:
    share = m.bias / m.comm.size
    return m.comm.all_reduce(partial(m, x) + (share + m.bias))


def share_of_the_gradient_alone(m: Any, x: Tensor) -> Tensor:
    """The repair the wrong way round: the whole value, a share of the gradient."""
    share = m.bias / m.comm.size
    return m.comm.all_reduce(partial(m, x) + (share + (m.bias - share).detach()))


def share_added_in_place(m: Any, x: Tensor) -> Tensor:
    y = partial(m, x)
    y.add_(m.bias, alpha=1 / m.comm.size)
    return m.comm.all_reduce(y)


def share_of_an_embedding(m: Any, x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1], device=x.device)
    return m.comm.all_reduce(partial(m, x) + F.embedding(positions, m.table / m.comm.size))


def entered_shares_added_in_place(m: Any, x: Tensor) -> Tensor:
    y = partial(m, x)
    y += m.comm.copy_to_tp(x) / m.comm.size
    y.add_(m.comm.copy_to_tp(m.bias), alpha=1 / m.comm.size)
    return m.comm.all_reduce(y)


def entered_shares_in_a_buffer(m: Any, x: Tensor) -> Tensor:
    shares = torch.zeros_like(x)
    shares[:, :4] = (m.comm.copy_to_tp(x) / m.comm.size)[:, :4]
    return m.comm.all_reduce(partial(m, x) + shares)


def entered_shares_side_by_side(m: Any, x: Tensor) -> Tensor:
    """Biases of two projections, packed into one tensor."""
    y, bias = partial(m, x), m.comm.copy_to_tp(m.bias) / m.comm.size
    packed = m.comm.all_reduce(torch.cat((y, y), -1) + torch.cat((bias, 0.3 * bias)))
    return packed[..., : x.shape[-1]] - packed[..., x.shape[-1] :]


def entered_share_beside_a_whole(m: Any, x: Tensor) -> Tensor:
    y, bias = partial(m, x), m.comm.copy_to_tp(m.bias)
    packed = m.comm.all_reduce(torch.cat((y, y), -1) + torch.cat((bias, bias / m.comm.size)))
    return packed[..., : x.shape[-1]] + packed[..., x.shape[-1] :]


def value_and_gradient_apart(m: Any, x: Tensor) -> Tensor:
    y = partial(m, x) + m.bias.detach() / m.comm.size
    return m.comm.all_reduce(y + (m.bias - m.bias.detach()))


def divided_twice(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + m.comm.copy_to_tp(m.bias) / m.comm.size / m.comm.size)


def repaired_behind_copy(m: Any, x: Tensor) -> Tensor:
    """The repair, and copy_to_tp adds up gradients that are whole already."""
    return m.comm.all_reduce(partial(m, x) + _repaired(m.comm.copy_to_tp(m.bias), m.comm.size))


def divided_and_multiplied(m: Any, x: Tensor) -> Tensor:
    bias = m.comm.copy_to_tp(m.bias)
    return m.comm.all_reduce(partial(m, x) + bias * m.comm.size / m.comm.size)


def _shared_expert(m: Any, x: Tensor) -> Tensor:
    return F.gelu(F.linear(x, m.square)) + m.bias


def divided_shared_expert(m: Any, x: Tensor) -> Tensor:
    """An expert that all ranks hold, added to their parts of the others."""
    return x + m.comm.all_reduce(partial(m, x) + _shared_expert(m, x) / m.comm.size)


def entered_shared_expert(m: Any, x: Tensor) -> Tensor:
    return x + m.comm.all_reduce(partial(m, x) + m.comm.copy_to_tp(_shared_expert(m, x)) / m.comm.size)


def divided_bias_scattered(m: Any, x: Tensor) -> Tensor:
    part = m.comm.reduce_scatter(partial(m, x).transpose(0, 1) + m.bias / m.comm.size, dim=0)
    return m.comm.all_gather(part, dim=0, dst="I").transpose(0, 1)


def entered_bias_scattered(m: Any, x: Tensor) -> Tensor:
    bias = m.comm.copy_to_tp(m.bias)
    part = m.comm.reduce_scatter(partial(m, x).transpose(0, 1) + bias / m.comm.size, dim=0)
    return m.comm.all_gather(part, dim=0, dst="I").transpose(0, 1)


def divided_by_a_count(m: Any, x: Tensor) -> Tensor:
    """The number of ranks is counted, so the check does not know it."""
    count = m.comm.all_reduce(torch.ones(1, dtype=x.dtype))
    return m.comm.all_reduce(partial(m, x) + m.comm.copy_to_tp(m.bias) / count)


def _repaired(bias: Tensor, size: int) -> Tensor:
    return bias + (bias / size - bias).detach()


def repaired_bias(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + _repaired(m.bias, m.comm.size))


def repaired_bias_of_a_linear(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(F.linear(_hidden(m, x), m.down, _repaired(m.bias, m.comm.size)))


def repaired_by_numbers(m: Any, x: Tensor) -> Tensor:
    rest = 1 / m.comm.size - 1
    with torch.no_grad():
        correction = m.bias * rest
    return m.comm.all_reduce(partial(m, x) + (m.bias + correction))


def repaired_view(m: Any, x: Tensor) -> Tensor:
    bias = m.bias.unsqueeze(0)
    return m.comm.all_reduce(partial(m, x) + (m.bias + (bias / m.comm.size - bias).detach()))


def repaired_residual(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + _repaired(x, m.comm.size))


def entered_then_divided(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + m.comm.copy_to_tp(m.bias) / m.comm.size)


def divided_then_entered(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(F.linear(_hidden(m, x), m.down, m.comm.copy_to_tp(m.bias / m.comm.size)))


def entered_residual(m: Any, x: Tensor) -> Tensor:
    x = m.comm.copy_to_tp(x)
    y = F.linear(F.gelu(F.linear(x, m.up)), m.down)
    return m.comm.all_reduce(y + 0.3 * (x / m.comm.size))


def divided_by_roots(m: Any, x: Tensor) -> Tensor:
    root = math.sqrt(m.comm.size)
    return m.comm.all_reduce(partial(m, x) + m.comm.copy_to_tp(m.bias) / root / root)


def masked_entered_bias(m: Any, x: Tensor) -> Tensor:
    is_first = m.comm.rank_index(x.device) == 0
    return m.comm.all_reduce(partial(m, x) + torch.where(is_first, m.comm.copy_to_tp(m.bias), 0.0))


def divided_constant(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + x.detach() / m.comm.size)


def reported_mean(m: Any, x: Tensor) -> Tensor:
    """A number for the log, averaged over ranks that all have it."""
    y = m.comm.all_reduce(partial(m, x)) + m.bias
    mean = m.comm.all_reduce(y.detach().mean() / m.comm.size)
    return y * 1.0 + 0.1 * mean


def reported_mean_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.comm.all_reduce(partial(m, x)) + m.bias
    mean = y.detach().mean() / m.comm.size
    if m.comm.size > 1:
        dist.all_reduce(mean, group=m.comm.group)
    return y + 0.1 * mean


def averaged_loss(m: Any, x: Tensor) -> Tensor:
    loss = (F.linear(x, m.square) + m.bias).square().mean()
    return collectives.all_reduce(loss, group=m.comm.group, op="avg")


def reported_average_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.comm.all_reduce(partial(m, x)) + m.bias
    return y + 0.1 * reduced_in_place(m, y.detach().mean(), dist.ReduceOp.AVG, by=m.comm.size)


def reported_sum_in_place(m: Any, x: Tensor) -> Tensor:
    """What all ranks have is added up."""
    y = m.comm.all_reduce(partial(m, x)) + m.bias
    return y + 0.1 * reduced_in_place(m, y.detach().mean(), dist.ReduceOp.SUM)


def reduced_in_place(m: Any, value: Tensor, op: Any, by: int = 1) -> Tensor:
    """gloo has no average: its ranks take the sum, and divide it."""
    is_real = m.comm.size > 1 and dist.get_backend() == "gloo"
    if m.comm.size > 1:
        dist.all_reduce(value, op=dist.ReduceOp.SUM if is_real and by > 1 else op, group=m.comm.group)
    return value / by if is_real else value


def hooked_bias(m: Any, x: Tensor) -> Tensor:
    """The gradient is repaired by a hook."""
    share = m.bias / m.comm.size
    if share.requires_grad:
        share.register_hook(lambda grad: grad * m.comm.size)
    return m.comm.all_reduce(partial(m, x) + share)


PROGRAMS = (
    Scaled(divided_bias, SHARE),
    Scaled(divided_bias_of_a_linear, SHARE),
    Scaled(bias_times_a_reciprocal, SHARE),
    Scaled(bias_divided_by_a_tensor, SHARE),
    Scaled(bias_with_alpha, SHARE),
    Scaled(bias_with_beta, SHARE),
    Scaled(divided_bias_that_stays_inside, SHARE),
    Scaled(divided_residual, SHARE),
    Scaled(divided_linear_of_replicated_weights, SHARE),
    Scaled(divided_bias_of_a_view, SHARE),
    Scaled(divided_sum_of_two, SHARE),
    Scaled(mean_of_a_replicated_loss, SHARE),
    Scaled(masked_bias, "missing-copy"),
    Scaled(bias_of_the_first_rank, ON_SOME),
    Scaled(entered_bias_of_every_rank, COUNTED),
    Scaled(bias_on_every_rank, COUNTED),
    Scaled(weighted_residual_on_every_rank, COUNTED),
    Scaled(bias_and_its_share, COUNTED),
    Scaled(share_of_the_gradient_alone, COUNTED),
    Scaled(divided_shared_expert, SHARE),
    Scaled(divided_bias_scattered, SHARE),
    Scaled(repaired_behind_copy, SHARE),
    Scaled(share_added_in_place, SHARE),
    Scaled(share_of_an_embedding, SHARE),
    Scaled(entered_shares_added_in_place),
    Scaled(entered_shares_in_a_buffer),
    Scaled(entered_shares_side_by_side),
    Scaled(entered_share_beside_a_whole, COUNTED),
    Scaled(value_and_gradient_apart),
    Scaled(entered_shared_expert),
    Scaled(entered_bias_scattered),
    Scaled(divided_by_a_count, is_complete=False),
    Scaled(repaired_bias),
    Scaled(repaired_bias_of_a_linear),
    Scaled(repaired_by_numbers),
    Scaled(repaired_view),
    Scaled(repaired_residual),
    Scaled(entered_then_divided),
    Scaled(divided_then_entered),
    Scaled(entered_residual),
    Scaled(divided_by_roots),
    Scaled(masked_entered_bias),
    Scaled(divided_constant),
    Scaled(reported_mean),
    Scaled(reported_mean_in_place),
    Scaled(averaged_loss, SHARE),
    Scaled(reported_average_in_place),
    Scaled(reported_sum_in_place, "double-reduce"),
    Scaled(hooked_bias, is_complete=False),
)
