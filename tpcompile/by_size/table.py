"""Measured times of all-reduces -> which algorithm sums a message, by its size, the number of ranks and the GPU."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.reader import read_record

Algorithm = Literal["nccl", "one_shot", "two_shot"]
InFlight = Literal["nccl", "by_rows", "push", "nccl_beside", "by_rows_beside", "push_beside"]
NCCL: Algorithm = "nccl"
MIN_RATIO = 1.03
"""How much faster than NCCL an algorithm must be to be used: times that are measured twice differ by up to 3 %."""
DTYPES = ("bfloat16", "float32")
"""Element types that torch's kernels for symmetric memory sum."""
VECTOR_BYTES = 16
"""Bytes that torch's kernels for symmetric memory read at once: addresses and parts of messages are multiples of it."""
PAIR = 2
"""Ranks of a group whose messages may be pushed: with more, each rank would send its whole message to each other."""
NO_SHIPPED = "TPCOMPILE_NO_SHIPPED_TABLES"
"""Variable: 1 leaves `table.json` out, so that a machine uses what it has measured itself."""
_FILE = Path(__file__).with_name("table.json")


class Row(Frozen):
    """Messages of up to `up_to_bytes` bytes, and more than those of the row before."""

    up_to_bytes: int
    algorithm: Algorithm


class Measured(Frozen):
    """One size: microseconds of an all-reduce in a CUDA graph, by algorithm, with the copies that it needs."""

    size_bytes: int
    us: dict[Algorithm, float]


class MeasuredInFlight(Frozen):
    """One size: microseconds of a product and its sum, by what makes the sum, then with a second product beside it.

    NCCL, the algorithm of the cell's rows, for which the second product waits, or copy engines, which push it.
    """

    size_bytes: int
    us: dict[InFlight, float]


class Cell(Frozen):
    """The rows for one model of GPU and number of ranks."""

    gpu: str
    """Model, as the driver names it: `NVIDIA H100 80GB HBM3`; `cpu` without one."""
    num_ranks: int
    rows: tuple[Row, ...]
    """Rows in the order of their sizes; NCCL sums larger messages."""
    push_from_bytes: int | None = None
    """Messages of two ranks that are products, or have work beside them, are sent by copy engines from this size on."""
    measured: tuple[Measured, ...] = ()
    in_flight: tuple[MeasuredInFlight, ...] = ()
    command: str = ""
    versions: dict[str, str] = {}


class Table(Frozen):
    """Cells of the GPUs that were measured; all others use NCCL."""

    schema_version: int = 1
    cells: tuple[Cell, ...] = ()

    @classmethod
    def read(cls, path: Path | str) -> Table:
        """A file that `write` made."""
        return read_record(cls, Path(path))

    def write(self, path: Path | str) -> None:
        """Write the file."""
        Path(path).write_text(f"{self.to_json(indent=1)}\n")

    def cell(self, gpu: str, num_ranks: int) -> Cell | None:
        """The cell of a GPU and number of ranks; None for one that was not measured."""
        found = [cell for cell in self.cells if (cell.gpu, cell.num_ranks) == (gpu, num_ranks)]
        return found[0] if found else None

    def without(self, gpu: str, num_ranks: int) -> Table:
        """The table without that cell."""
        return self.changed(cells=tuple(one for one in self.cells if (one.gpu, one.num_ranks) != (gpu, num_ranks)))

    def with_cell(self, cell: Cell) -> Table:
        """The table with this cell in place of what it has for that GPU and number of ranks."""
        others = self.without(cell.gpu, cell.num_ranks).cells
        return self.changed(cells=tuple(sorted([*others, cell], key=lambda one: (one.gpu, one.num_ranks))))

    def rows(self, gpu: str, num_ranks: int) -> str:
        """The rows as the op takes them, `65536:nccl 8388608:two_shot`; empty where NCCL sums everything."""
        cell = self.cell(gpu, num_ranks)
        return "" if cell is None else text_of(cell.rows)

    def push_from(self, gpu: str, num_ranks: int) -> int | None:
        """`push_from_bytes` of the cell; None where there is no cell, and for more than two ranks."""
        cell = self.cell(gpu, num_ranks)
        return cell.push_from_bytes if cell is not None and num_ranks == PAIR else None

    @property
    def digest(self) -> str:
        """Hash of all rows: equal for tables that choose alike."""
        chosen = [(cell.gpu, cell.num_ranks, text_of(cell.rows), cell.push_from_bytes or 0) for cell in self.cells]
        return hashlib.sha256(json.dumps(sorted(chosen)).encode()).hexdigest()[:12]


def shipped() -> Table:
    """`table.json`; empty without it, and with TPCOMPILE_NO_SHIPPED_TABLES=1."""
    is_left_out = os.environ.get(NO_SHIPPED, "0") != "0"
    return Table() if is_left_out or not _FILE.exists() else _read_shipped()


@cache
def _read_shipped() -> Table:
    return Table.read(_FILE)


def fastest_rows(measured: Iterable[Measured]) -> tuple[Row, ...]:
    """Rows that are not slower than NCCL at any measured size.

    A row holds from the size before it to its own: its algorithm is the fastest at its own size of those that beat NCCL
    there and are no slower than NCCL at the size before, or NCCL.
    """
    kept: list[Row] = []
    before = None
    for one in sorted(measured, key=lambda each: each.size_bytes):
        faster = [name for name, us in one.us.items() if us * MIN_RATIO <= one.us[NCCL]]
        if before is not None:
            faster = [name for name in faster if before.us[name] <= before.us[NCCL]]
        fastest = min(faster, key=one.us.__getitem__, default=NCCL)
        row = Row(up_to_bytes=one.size_bytes, algorithm=fastest)
        if kept and kept[-1].algorithm == row.algorithm:
            kept.pop()
        kept.append(row)
        before = one
    if kept and kept[-1].algorithm == NCCL:
        kept.pop()
    return tuple(kept)


def least_pushed(measured: Iterable[MeasuredInFlight]) -> int | None:
    """Least size from which on pushing is faster than every other form at all measured sizes; None where it never is.

    With a second product beside the sum it must not be slower there.
    """
    least = None
    for one in sorted(measured, key=lambda each: each.size_bytes, reverse=True):
        us = one.us
        is_faster = us["push"] * MIN_RATIO <= min(us["nccl"], us["by_rows"])
        if not is_faster or us["push_beside"] > min(us["nccl_beside"], us["by_rows_beside"]):
            break
        least = one.size_bytes
    return least


def algorithm_for(rows: str, *, size_bytes: int, dtype: str, num_ranks: int) -> Algorithm:
    """Which algorithm sums a message; of its arguments alone, so that all ranks choose alike.

    NCCL for element types that the kernels do not sum, and for sizes that are not whole vectors of 16 bytes per rank.
    """
    is_whole = size_bytes > 0 and size_bytes % (VECTOR_BYTES * num_ranks) == 0
    if dtype not in DTYPES or not is_whole:
        return NCCL
    for row in rows_of(rows):
        if size_bytes <= row.up_to_bytes:
            return row.algorithm
    return NCCL


@lru_cache(maxsize=64)
def rows_of(text: str) -> tuple[Row, ...]:
    """The rows of a text that `Table.rows` made."""
    parts = [word.split(":") for word in text.split()]
    return tuple(Row.model_validate({"up_to_bytes": size, "algorithm": name}) for size, name in parts)


def text_of(rows: Iterable[Row]) -> str:
    """The rows as the op takes them."""
    return " ".join(f"{row.up_to_bytes}:{row.algorithm}" for row in rows)


def shown(rows: str, push_from: int | None = None) -> str:
    """The rows for people: `two_shot to 8388608 bytes, nccl above, in flight pushed from 1048576 bytes on`."""
    parts = [f"{row.algorithm} to {row.up_to_bytes} bytes" for row in rows_of(rows)]
    parts.append("nccl above" if parts else "nccl")
    if push_from is not None:
        parts.append(f"in flight pushed from {push_from} bytes on")
    return ", ".join(parts)
