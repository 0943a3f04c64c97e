"""Repairs of the result of one op that are tried: a table. Each says what was wrong where it makes the run right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from tpcompile.evidence.records import MistakeKind
from tpcompile.numerics.judged import LOOKUPS
from tpcompile.numerics.op_names import COLLECTIVES, MASKS, SAME_VALUES, STATISTICS, SUMS_OVER_RANKS
from tpcompile.numerics.trace import Value

_LIKELY = STATISTICS | MASKS | LOOKUPS | {"aten.sum", "aten.arange"}
"""Ops whose result is often one rank's part of what it is used for: tried first."""
_NOT_SUMS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
"""Part of an op's name -> what its results on all ranks are combined with, which is a sum for all others."""
_MEANS = "mean"
_SCALES = {"aten.mul", "aten.div"}
_LOOKS_UP = ("aten.index", "aten._unsafe_index", "aten.embedding", "aten.gather", "aten.scatter", "aten.take")
"""How names of ops begin that are given places in a table."""
_POSITIONS = "aten.arange"


class Repair(NamedTuple):
    """A change of an op's result."""

    fits: Callable[[int, Sequence[Value], int], bool]
    """Place of the op, values of the run, number of ranks."""
    changed: Callable[[Tensor, Value, dist.ProcessGroup], Tensor]
    """Result, the op, group -> the result in its stead. All ranks call it."""
    says: Callable[[Value, int], dict[str, Any]]
    """The op, number of ranks -> fields of the WrongOp."""


def is_likely(value: Value) -> bool:
    """True for an op that is tried before others."""
    return value.name in _LIKELY or value.name in SUMS_OVER_RANKS


def _may_lack_a_sum(place: int, values: Sequence[Value], _size: int) -> bool:
    value = values[place]
    is_collective = value.name.startswith(COLLECTIVES)
    return value.is_float and not value.in_backward and not is_collective and value.name not in SAME_VALUES


def _combined(result: Tensor, value: Value, group: dist.ProcessGroup) -> Tensor:
    op = next((op for part, op in _NOT_SUMS.items() if part in value.name), dist.ReduceOp.SUM)
    total = result.contiguous().clone()  # NCCL takes no other
    dist.all_reduce(total, op, group=group)
    return total / group.size() if _MEANS in value.name else total


def _says_combined(value: Value, _size: int) -> dict[str, Any]:
    if value.name in STATISTICS:
        return {"kind": MistakeKind.LOCAL_STATISTIC}
    return {"kind": MistakeKind.NOT_SUMMED, "of": "and is used without it: with the sum the run is right"}


def _may_be_scaled(place: int, values: Sequence[Value], _size: int) -> bool:
    """True for a sum over the ranks, and for a product with a Python number."""
    value = values[place]
    is_there = value.tensor is not None and not value.is_late
    is_by_number = value.name in _SCALES and len(value.sources) == 1
    return (value.name in SUMS_OVER_RANKS or is_by_number) and value.is_float and is_there and not value.in_backward


def _is_of_positions(place: int, values: Sequence[Value], size: int) -> bool:
    """True for positions of which those of other ranks would be in each table that they are looked up in.

    A place outside of a table raises on one rank alone, and on a GPU ends the process.
    """
    value = values[place]
    if value.name != _POSITIONS or value.in_backward:
        return False
    last = size * max(1, math.prod(value.shape))
    reached = {place}
    for number in range(place + 1, len(values)):
        user = values[number]
        if not reached.isdisjoint(user.sources):
            if not user.is_float:
                reached.add(number)
            tables = [values[source].shape for source in user.sources if source not in reached]
            if user.name.startswith(_LOOKS_UP) and any(min(shape, default=0) < last for shape in tables):
                return False
    return True


REPAIRS: dict[str, Repair] = {
    "combine": Repair(_may_lack_a_sum, _combined, _says_combined),
    "offset": Repair(
        _is_of_positions,
        # Positions that begin at 0 on every rank: those that follow the ranks before this one.
        lambda result, _value, group: result + group.rank() * result.numel(),
        lambda _value, _size: {"kind": MistakeKind.OTHER_PART, "other": 0},
    ),
    "divide": Repair(
        _may_be_scaled,
        lambda result, _value, group: result / group.size(),
        lambda _value, size: {"kind": MistakeKind.TP_TIMES, "ratio": float(size)},
    ),
    "multiply": Repair(
        _may_be_scaled,
        lambda result, _value, group: result * group.size(),
        lambda _value, size: {"kind": MistakeKind.ONE_OF_TP, "ratio": 1 / size},
    ),
}
"""Name -> repair; for one op they are tried in this order."""
