"""Which other rows of parameters are tried, and that a rank has its own afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tpcompile.evidence.records import MistakeKind
from tpcompile.numerics.recut import Recut, recut_as, recuts_of
from tpcompile.numerics.rows import Rows, of_unknown_rows


def tried(length: int, own: list[int], *, rank: int, size: int) -> dict[int, tuple[list[int], bool, bool]]:
    """Pieces -> the rows, whether they are others than its own, and whether its own are unusual."""
    found = recuts_of({"layers.0.k.weight": Rows(0, torch.tensor(own), length)}, rank=rank, size=size)
    return {each.pieces: (each.index.tolist(), bool(each.changes), each.is_unusual) for each in found}


def test_rows_in_turn_are_unusual_and_those_in_the_order_of_the_ranks_are_tried() -> None:
    assert tried(4, [1, 3], rank=1, size=2) == {1: ([2, 3], True, True), 2: ([1, 3], False, True)}


def test_rows_in_the_order_of_the_ranks_are_changed_for_packed_ones_only() -> None:
    found = tried(12, [6, 7, 8, 9, 10, 11], rank=1, size=2)
    assert found[1] == ([6, 7, 8, 9, 10, 11], False, False)
    assert found[2] == ([3, 4, 5, 9, 10, 11], True, False)
    assert found[3] == ([2, 3, 6, 7, 10, 11], True, False)


@pytest.mark.parametrize(("rank", "rows"), [(0, [0, 1]), (1, [0, 1]), (2, [2, 3]), (3, [2, 3])])
def test_of_fewer_heads_than_ranks_those_that_follow_one_another_share_one(rank: int, rows: list[int]) -> None:
    own = [2 * (rank % 2), 2 * (rank % 2) + 1]
    assert tried(4, own, rank=rank, size=4) == {1: (rows, own != rows, own != rows)}


@pytest.mark.parametrize("own", [[0, 1, 2], [0, 1, 2, 3, 4]])
def test_of_parts_that_are_not_equal_nothing_is_known(own: list[int]) -> None:
    assert tried(8, own, rank=0, size=2) == {}


def test_parameters_that_are_cut_alike_are_tried_together_and_by_module() -> None:
    index = torch.tensor([0, 2])
    layouts = {f"layers.{layer}.{name}": Rows(0, index, 4) for layer in (0, 1) for name in ("k.weight", "decay")}
    names = [set(each.names) for each in recuts_of(layouts, rank=0, size=2) if each.pieces == 1]
    assert names == [set(layouts), {name for name in layouts if "k." in name}, {n for n in layouts if "decay" in n}]


def test_its_own_rows_are_back_afterwards_also_where_the_run_raises() -> None:
    module, full = nn.Linear(3, 2, bias=False), nn.Linear(3, 4, bias=False)
    layouts = {"weight": Rows(0, torch.tensor([0, 2]), 4)}
    with torch.no_grad():
        module.weight.copy_(full.weight[[0, 2]])
    recut = Recut(("weight",), 1, torch.tensor([0, 1]), changes=("weight",), is_unusual=True)
    with pytest.raises(ValueError, match="of the program"), recut_as(module, full, recut, layouts):
        assert torch.equal(module.weight, full.weight[:2])
        raise ValueError("of the program")
    assert torch.equal(module.weight, full.weight[[0, 2]])
    assert recut.says["kind"] == MistakeKind.OTHER_PART
    assert recut._replace(pieces=2).says["kind"] == MistakeKind.CUT_AS_ONE


def test_a_matrix_that_was_cut_as_flat_memory_is_tried_with_its_part_along_the_dim_that_is_shorter() -> None:
    full = {"table": torch.arange(24.0).view(3, 8), "bias": torch.zeros(8), "scale": torch.ones(2)}
    flat = {"table": full["table"].reshape(2, -1)[1].view(3, 4), "bias": torch.zeros(4), "other": torch.ones(2)}
    found = of_unknown_rows(flat, full)
    assert {name: (rows.dim, rows.length) for name, rows in found.items()} == {"table": (1, 8), "bias": (0, 8)}
    tries = [each for each in recuts_of({"table": found["table"]}, rank=1, size=2) if each.pieces == 1]
    assert [(each.index.tolist(), each.changes, each.is_unusual) for each in tries] == [
        ([4, 5, 6, 7], ("table",), True)
    ]
    square = of_unknown_rows({"table": torch.ones(2, 2)}, {"table": torch.ones(4, 4)})
    assert square == {}, "which dim is cut is not known"
