"""The rows of a full parameter that a rank has, in any layout; none where it has a row of nobody's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpcompile.numerics.rows import Rows, all_rows, unequal_cuts

FULL = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


def rows(local: Tensor, full: Tensor = FULL, *, rank: int = 1) -> Rows | None:
    return all_rows({"w": local}, {"w": full}, rank=rank, size=2).get("w")


@pytest.mark.parametrize(
    ("local", "dim", "index"),
    [
        (FULL[6:], 0, [6, 7, 8, 9, 10, 11]),
        (FULL[:, 3:], 1, [3, 4, 5]),
        (FULL[[2, 3, 6, 7, 10, 11]], 0, [2, 3, 6, 7, 10, 11]),
        (FULL.flip(0), 0, list(range(11, -1, -1))),
        (torch.cat((FULL[10:], torch.zeros(3, 6))), 0, [10, 11, -1, -1, -1]),
    ],
    ids=["equal part", "columns", "packed", "a different order", "padded"],
)
def test_the_rows_are_found_in_any_layout(local: Tensor, dim: int, index: list[int]) -> None:
    found = rows(local)
    assert found is not None and found.index is not None
    assert (found.dim, found.index.tolist()) == (dim, index)
    assert torch.equal(found.of(FULL), local)


def test_a_whole_parameter_needs_no_rows_and_a_row_of_nobodys_has_none() -> None:
    assert rows(FULL.clone()) == Rows()
    assert rows(FULL + 1) == Rows()  # its shape says that it is whole: it is compared, and is wrong
    assert rows(torch.cat((FULL[:3], FULL[:1] + 1))) is None
    assert rows(FULL[:3, :2]) is None


def test_a_bias_of_zeros_has_the_rows_of_its_weight_or_else_an_equal_part() -> None:
    packed = [2, 3, 6, 7, 10, 11]
    local = {"q.bias": torch.zeros(6), "q.weight": FULL[packed], "b": torch.zeros(6)}
    full = {"q.bias": torch.zeros(12), "q.weight": FULL, "b": torch.zeros(12)}
    found = all_rows(local, full, rank=1, size=2)
    assert {name: each.index.tolist() for name, each in found.items() if each.index is not None} == {
        "q.weight": packed,
        "q.bias": packed,
        "b": [6, 7, 8, 9, 10, 11],
    }


def test_a_cut_in_unequal_parts_is_that_of_activations_and_gradients_too() -> None:
    equal, packed = rows(FULL[6:]), rows(FULL[[2, 3, 6, 7, 10]])
    assert equal is not None and packed is not None
    (cut,) = unequal_cuts([equal, packed, packed], rank=1, size=2)
    features = torch.randn(4, 12)
    (part,) = cut.parts_of(features)
    assert torch.equal(part, features[:, [2, 3, 6, 7, 10]])
    assert cut.parts_of(torch.randn(3, 4)) == [] == cut.parts_of(torch.tensor(1.0))
