"""Programs that reduce with an average, and programs in which one rank adds a tensor for all.

As those of `scaled`, each is its own single-device reference with `comm.size` 1.
"""

# B batch, S sequence, D model width, F hidden width; lower case is this rank's share
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.typecheck.scaled import COUNTED, ON_SOME, SHARE, Scaled, partial
from tpcompile.collectives import api as collectives

# Averages of partial sums.


def _hidden(m: Any, x: Tensor) -> Tensor:
    return F.gelu(F.linear(m.comm.copy_to_tp(x), m.up))


def _average(m: Any, x: Tensor) -> Tensor:
    return x if m.comm.size == 1 else collectives.all_reduce(x, group=m.comm.group, op="avg")


def average_of_parts(m: Any, x: Tensor) -> Tensor:
    return _average(m, partial(m, x)) + m.bias


def average_of_halves(m: Any, x: Tensor) -> Tensor:
    return _average(m, 0.5 * partial(m, x)) + m.bias


def average_of_scaled_parts(m: Any, x: Tensor) -> Tensor:
    return _average(m, partial(m, x) * m.comm.size) + m.bias


def average_of_a_scaled_hidden(m: Any, x: Tensor) -> Tensor:
    return _average(m, F.linear(_hidden(m, x) * m.comm.size, m.down)) + m.bias


def average_of_two_scaled_parts(m: Any, x: Tensor) -> Tensor:
    y = partial(m, x) * m.comm.size - F.linear(m.comm.size * _hidden(m, 2 * x), m.down)
    return _average(m, y.transpose(0, 1).contiguous()).transpose(0, 1) + m.bias


def average_of_more_than_scaled_parts(m: Any, x: Tensor) -> Tensor:
    return _average(m, partial(m, x) * m.comm.size * 0.7) + m.bias


def entered_bias_in_an_average(m: Any, x: Tensor) -> Tensor:
    return _average(m, partial(m, x) * m.comm.size + m.comm.copy_to_tp(m.bias))


def bias_in_an_average(m: Any, x: Tensor) -> Tensor:
    """The backward of an average divides the gradient."""
    return _average(m, partial(m, x) * m.comm.size + m.bias)


def divided_parts(m: Any, x: Tensor) -> Tensor:
    """A mean over the ranks, where a sum is right."""
    return m.comm.all_reduce(partial(m, x) / m.comm.size) + m.bias


def divided_sum(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x)) / m.comm.size + m.bias


# One rank adds for all.


def residual_of_the_first_rank(m: Any, x: Tensor) -> Tensor:
    y = partial(m, x)
    if m.comm.rank == 0:
        y = y + x
    return m.comm.all_reduce(y)


def entered_residual_of_the_first_rank(m: Any, x: Tensor) -> Tensor:
    """All ranks run the backward of copy_to_tp, which the projection of each needs."""
    x = m.comm.copy_to_tp(x)
    y = F.linear(F.gelu(F.linear(x, m.up)), m.down)
    if m.comm.rank == 0:
        y = y + x
    return m.comm.all_reduce(y)


def entered_bias_times_zero_elsewhere(m: Any, x: Tensor) -> Tensor:
    weight = 1.0 if m.comm.rank == 0 else 0.0
    return m.comm.all_reduce(partial(m, x) + m.comm.copy_to_tp(m.bias) * weight)


def bias_times_zero_elsewhere(m: Any, x: Tensor) -> Tensor:
    weight = 1.0 if m.comm.rank == 0 else 0.0
    return m.comm.all_reduce(partial(m, x) + m.bias * weight)


# A tensor of one value is a number.


def _filled(m: Any, x: Tensor, value: float) -> Tensor:
    return torch.full(m.bias.shape, value, dtype=x.dtype)


def bias_divided_by_a_filled_tensor(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + torch.div(m.bias, _filled(m, x, float(m.comm.size))))


def entered_bias_divided_by_a_filled_tensor(m: Any, x: Tensor) -> Tensor:
    bias = m.comm.copy_to_tp(m.bias)
    return m.comm.all_reduce(partial(m, x) + bias / _filled(m, x, float(m.comm.size)))


def bias_times_a_filled_tensor(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(partial(m, x) + m.bias * _filled(m, x, 1.0))


PROGRAMS = (
    Scaled(average_of_parts, "wrong-reduce-op"),
    Scaled(average_of_halves, "wrong-reduce-op"),
    Scaled(average_of_scaled_parts),
    Scaled(average_of_a_scaled_hidden),
    Scaled(average_of_two_scaled_parts, is_complete=False),
    Scaled(average_of_more_than_scaled_parts, is_complete=False),
    Scaled(entered_bias_in_an_average, is_complete=False),
    Scaled(bias_in_an_average, SHARE),
    Scaled(residual_of_the_first_rank, ON_SOME),
    Scaled(entered_residual_of_the_first_rank, is_complete=False),
    Scaled(entered_bias_times_zero_elsewhere, is_complete=False),
    Scaled(bias_times_zero_elsewhere, ON_SOME),
    Scaled(bias_divided_by_a_filled_tensor, SHARE),
    Scaled(entered_bias_divided_by_a_filled_tensor),
    Scaled(bias_times_a_filled_tensor, COUNTED),
)
