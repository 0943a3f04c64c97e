"""Rows are chosen so that no measured size is slower than NCCL, and every rank chooses alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tpcompile.by_size.table import (
    MIN_RATIO,
    Algorithm,
    Cell,
    Measured,
    Row,
    Table,
    algorithm_for,
    fastest_rows,
    rows_of,
    shipped,
    shown,
)  # fmt: skip

ROWS = "4096:one_shot 8192:nccl 65536:two_shot"
KIB = 1024


def measured(**us: tuple[float, ...]) -> tuple[Measured, ...]:
    """Sizes of 1, 2, 4, ... KiB."""
    return tuple(
        Measured(size_bytes=KIB << step, us=dict(zip(us, times, strict=True)))  # type: ignore[arg-type]
        for step, times in enumerate(zip(*us.values(), strict=True))
    )


def rows(**us: tuple[float, ...]) -> list[tuple[int, Algorithm]]:
    return [(row.up_to_bytes // KIB, row.algorithm) for row in fastest_rows(measured(**us))]


def test_the_fastest_is_chosen_and_equal_neighbours_are_one_row() -> None:
    found = rows(nccl=(10, 10, 10, 20), one_shot=(8, 8, 12, 40), two_shot=(9, 9, 8, 15))
    assert found == [(2, "one_shot"), (8, "two_shot")]


def test_what_is_as_fast_as_nccl_within_the_noise_is_left_to_it() -> None:
    assert rows(nccl=(10, 10), one_shot=(9.8, 9.0), two_shot=(12, 12)) == [(1, "nccl"), (2, "one_shot")]
    assert rows(nccl=(10, 10), one_shot=(11, 11), two_shot=(9.8, 10)) == []


def test_an_algorithm_that_is_slower_at_the_lower_end_of_a_row_is_not_in_it() -> None:
    """At 2 KiB two-shot wins; at 1 KiB it loses, so sizes between them take the next one."""
    assert rows(nccl=(10, 20), one_shot=(9, 15), two_shot=(12, 10)) == [(2, "one_shot")]
    assert rows(nccl=(10, 20), one_shot=(12, 15), two_shot=(12, 10)) == []


@pytest.mark.parametrize(
    ("size", "algorithm"),
    [(4096, "one_shot"), (4096 + 32, "nccl"), (16384, "two_shot"), (65536, "two_shot"), (65536 + 32, "nccl")],
)
def test_a_size_takes_the_first_row_that_holds_it(size: int, algorithm: Algorithm) -> None:
    assert algorithm_for(ROWS, size_bytes=size, dtype="bfloat16", num_ranks=2) == algorithm


@pytest.mark.parametrize(
    ("size", "dtype", "num_ranks"),
    [(4096, "float16", 2), (4096, "float64", 2), (4096, "int64", 2), (4080, "bfloat16", 2), (96, "float32", 4)],
)
def test_what_the_kernels_do_not_sum_is_left_to_nccl(size: int, dtype: str, num_ranks: int) -> None:
    assert algorithm_for(ROWS, size_bytes=size, dtype=dtype, num_ranks=num_ranks) == "nccl"
    assert algorithm_for("", size_bytes=0, dtype="float32", num_ranks=2) == "nccl"


def table(algorithm: Algorithm = "one_shot", gpu: str = "GPU") -> Table:
    return Table(cells=(Cell(gpu=gpu, num_ranks=2, rows=(Row(up_to_bytes=4096, algorithm=algorithm),)),))


def test_an_unknown_gpu_or_number_of_ranks_has_no_rows() -> None:
    assert table().rows("GPU", 2) == "4096:one_shot"
    assert table().rows("GPU", 4) == table().rows("other", 2) == ""
    assert shown("") == "nccl" and re.match("one_shot .*4096 .*nccl", shown("4096:one_shot"))


def test_the_digest_is_of_what_is_chosen() -> None:
    (cell,) = table().cells
    remeasured = Table(cells=(cell.model_copy(update={"command": "again", "measured": measured(nccl=(1.0,))}),))
    assert remeasured.digest == table().digest
    assert len({table().digest, table("two_shot").digest, table(gpu="other").digest, Table().digest}) == 4


def test_a_written_table_is_read_again_and_a_cell_replaces_that_of_its_gpu(tmp_path: Path) -> None:
    both = table().with_cell(table(gpu="other").cells[0]).with_cell(table("two_shot").cells[0])
    both.write(tmp_path / "table.json")
    assert Table.read(tmp_path / "table.json") == both
    assert [(cell.gpu, cell.rows[0].algorithm) for cell in both.cells] == [("GPU", "two_shot"), ("other", "one_shot")]


def test_the_shipped_rows_are_those_of_their_measurement_and_never_slower_than_nccl() -> None:
    assert shipped().cells
    for cell in shipped().cells:
        assert cell.command and cell.rows == fastest_rows(cell.measured)
        text = shipped().rows(cell.gpu, cell.num_ranks)
        for one in cell.measured:
            chosen = algorithm_for(text, size_bytes=one.size_bytes, dtype="bfloat16", num_ranks=cell.num_ranks)
            assert one.us[chosen] <= one.us["nccl"]
            assert chosen == "nccl" or one.us[chosen] * MIN_RATIO <= one.us["nccl"]


def test_rows_that_are_slower_than_nccl_are_seen_by_that_check() -> None:
    (one,) = measured(nccl=(10.0,), one_shot=(12.0,))
    chosen = algorithm_for("1024:one_shot", size_bytes=one.size_bytes, dtype="bfloat16", num_ranks=2)
    assert one.us[chosen] > one.us["nccl"]
    assert rows_of("1024:one_shot") != fastest_rows([one])
