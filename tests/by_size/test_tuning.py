"""Times of the slowest rank become a cell, the same on all ranks; what is timed computes what it should."""

from __future__ import annotations

from tests.by_size import tuned_ranks as ranks
from tpcompile.by_size.table import Row
from tpcompile.testing import run_on_ranks


def test_all_ranks_have_the_cell_of_the_slowest_and_nothing_is_left_behind() -> None:
    first, second = run_on_ranks(ranks.measured_by_a_clock)
    assert first == second
    cell = first["cell"]
    # 0.5 us more on rank 1, also of the kernel alone that is taken off
    assert [(one.size_bytes, one.us) for one in cell.measured] == [
        (size, {"nccl": 10.0, "one_shot": 5.0, "two_shot": 8.0}) for size in (64, 4096)
    ]
    assert cell.rows == (Row(up_to_bytes=4096, algorithm="one_shot"),)
    assert (cell.gpu, cell.num_ranks, cell.command) == (ranks.GPU, 2, "a test")
    assert [one.size_bytes for one in cell.in_flight] == [1 << 20, 2 << 20]
    assert cell.push_from_bytes is None  # on this clock NCCL's product is the fastest
    assert [one.us for one in first["products"]] == [
        {"nccl": 13.5, "by_rows": 14.5, "push": 12.5, "nccl_beside": 20.5, "by_rows_beside": 21.5, "push_beside": 19.5}
    ] * 2
    assert first["left"] == [] and first["has the same random numbers"]


def test_a_product_and_its_sum_are_equal_in_all_forms() -> None:
    assert run_on_ranks(ranks.products_of_both) == [[True] * 13] * 2
