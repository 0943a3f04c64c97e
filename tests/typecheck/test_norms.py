"""Fused norms over channels: statistics along a shard are found, sharded channels raise no alarm."""

# N batch, C channels, S places; lower case is this rank's share
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.typecheck.programs import BIAS, PLAIN, SHARDED_BIAS, TP, WIDTH, built
from tpcompile.typecheck import Report, check_types

NORM = {"norm": BIAS}
Layouts = dict[str, Any]


def _checked(forward: Any, layouts: Layouts, input_type: str) -> Report:
    x = torch.ones(2, WIDTH, WIDTH)
    output = None if input_type == "I" else input_type
    return check_types(built(forward, **layouts), (x,), tp=TP, input_types=(input_type,), output_type=output)


def batch_norm(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, m.comm.copy_to_tp(m.norm), training=True)


def batch_norm_without_copy(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, m.norm, training=True)


def batch_norm_in_evaluation(m: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, torch.zeros(WIDTH), torch.ones(WIDTH), m.comm.copy_to_tp(m.norm), training=False)


def group_norm(m: Any, x: Tensor) -> Tensor:
    return F.group_norm(x, 4, m.comm.copy_to_tp(m.norm))


def batch_norm_of_sharded_channels(m: Any, x_NCS: Tensor) -> Tensor:
    h_NcS = F.linear(m.comm.copy_to_tp(x_NCS), m.up).transpose(1, 2)
    h_NcS = F.batch_norm(h_NcS, None, None, m.own, training=True)
    return m.comm.all_reduce(F.linear(h_NcS.transpose(1, 2), m.down))


def batch_norm_of_a_partial_sum(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.linear(m.comm.copy_to_tp(x), m.up), m.down)
    return F.batch_norm(y, None, None, training=True)


def weight_norm_of_columns(m: Any, x: Tensor) -> Tensor:
    """Every norm is over a whole row of the full weight."""
    weight = torch._weight_norm(m.up, m.own.unsqueeze(-1), 0)
    return m.comm.all_reduce(F.linear(F.linear(m.comm.copy_to_tp(x), weight), m.down))


def weight_norm_of_one_number(m: Any, x: Tensor) -> Tensor:
    """dim = 1 keeps the other dim, over which the columns are sharded."""
    weight = torch._weight_norm(m.up, m.comm.copy_to_tp(m.norm).unsqueeze(0), 1)
    return m.comm.all_reduce(F.linear(F.linear(m.comm.copy_to_tp(x), weight), m.down))


WRONG = [
    (batch_norm, NORM, "V(0)", "local-statistic"),
    (batch_norm, NORM, "V(2)", "local-statistic"),
    (batch_norm_without_copy, NORM, "V(0)", "local-statistic"),
    (batch_norm_without_copy, NORM, "V(1)", "missing-copy"),
    (group_norm, NORM, "V(2)", "local-statistic"),
    (batch_norm_of_a_partial_sum, PLAIN, "I", "partial-used-as-whole"),
    (weight_norm_of_one_number, PLAIN | NORM, "I", "local-statistic"),
]
RIGHT = [
    (batch_norm, NORM, "V(1)"),
    (batch_norm_in_evaluation, NORM, "V(0)"),
    (group_norm, NORM, "V(0)"),
    (batch_norm_of_sharded_channels, PLAIN | {"own": SHARDED_BIAS}, "I"),
    (weight_norm_of_columns, PLAIN | {"own": SHARDED_BIAS}, "I"),
]


@pytest.mark.parametrize(("forward", "layouts", "input_type", "rule"), WRONG)
def test_a_statistic_of_a_shard_is_found(forward: Any, layouts: Layouts, input_type: str, rule: str) -> None:
    report = _checked(forward, layouts, input_type)
    assert report.finding is not None and report.finding.rule == rule, str(report)


@pytest.mark.parametrize(("forward", "layouts", "input_type"), RIGHT)
def test_a_statistic_within_the_rank_is_clean(forward: Any, layouts: Layouts, input_type: str) -> None:
    _checked(forward, layouts, input_type).raise_on_violation(strict=True)
