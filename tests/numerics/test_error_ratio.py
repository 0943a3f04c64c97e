"""Errors as multiples of the single-device error, and names of nested tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tpcompile.numerics import error_ratio

EXACT = torch.linspace(1, 2, 1000, dtype=torch.float64)


def is_within(value: dict[str, float], limit: float) -> bool:
    return value["ratio"] <= limit  # False for NaN


class Pair(NamedTuple):
    """A named structure."""

    x: Tensor
    extra: dict[str, list[Tensor | None]]


def test_ratio_is_a_multiple_of_the_single_device_error() -> None:
    found = error_ratio.error_of(EXACT * (1 + 3e-3), EXACT * (1 + 1e-3), EXACT)
    assert math.isclose(found["ratio"], 3, rel_tol=1e-6)
    assert not is_within(found, 2.5)


def test_error_of_the_whole_counts_where_the_slice_was_lucky() -> None:
    assert error_ratio.error_of(EXACT * (1 + 1e-3), EXACT, EXACT, whole=1e-3)["ratio"] <= 1.001


def test_exact_single_device_result_allows_a_rounding_and_not_more() -> None:
    eps = torch.finfo(torch.float32).eps
    exact = EXACT.float().double()
    next_up = torch.nextafter(exact.float(), torch.tensor(9.0))
    got = torch.where(torch.arange(1000) % 4 == 0, next_up, exact.float())
    assert is_within(error_ratio.error_of(got, exact.float(), exact), 2.5)
    assert not is_within(error_ratio.error_of((exact * (1 + 10 * eps)).float(), exact.float(), exact), 2.5)


def test_few_numbers_get_room_for_scatter_and_a_wrong_one_is_still_seen() -> None:
    one = torch.tensor([1.0], dtype=torch.float64)
    assert is_within(error_ratio.error_of((one * (1 + 3e-7)).float(), one.float(), one), 2.5)
    assert not is_within(error_ratio.error_of((one * 1.001).float(), one.float(), one), 2.5)


@pytest.mark.parametrize("scale", [1.0, 3.0, 1e4])
def test_two_runs_of_a_wrong_result_are_as_near_as_those_of_a_right_one(scale: float) -> None:
    """An output that is too large by a factor rounds as much more."""
    exact = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    single, one, two = (scaled.float() for scaled in (exact, scale * exact, scale * exact * (1 + 2**-24)))
    assert is_within(error_ratio.distance(one, two, single, exact), 2.5)
    apart = two + scale * 1e-5
    assert not is_within(error_ratio.distance(one, apart, single, exact), 2.5)
    assert not is_within(error_ratio.distance(2 * one, one, single, exact), 2.5)
    assert not is_within(error_ratio.distance(one * float("nan"), one, single, exact), 2.5)


def test_nan_is_never_within_a_limit() -> None:
    assert not is_within(error_ratio.error_of(EXACT * math.nan, EXACT, EXACT), math.inf)


def test_missing_tensor_is_infinitely_wrong() -> None:
    assert not is_within(error_ratio.missing(), 1e300)


def test_nested_tensors_have_names_and_can_be_replaced() -> None:
    value = Pair(torch.zeros(1), {"kept": [None, torch.ones(2)]})
    named = error_ratio.named_tensors(value, "input")
    assert list(named) == ["input", "input.extra.kept.1"]
    again = error_ratio.replaced(value, [t + 1 for t in named.values()])
    assert isinstance(again, Pair) and again.extra["kept"][0] is None
    assert again.extra["kept"][1].tolist() == [2.0, 2.0]


def test_cast_leaves_masks_and_ids_alone() -> None:
    mask, ids, x = torch.ones(2, dtype=torch.bool), torch.arange(2), torch.ones(2)
    assert [t.dtype for t in error_ratio.cast((mask, ids, x), torch.float64)] == [
        torch.bool,
        torch.int64,
        torch.float64,
    ]
