"""Measured times of all-reduces -> which algorithm sums a message, by its size, the number of ranks and the GPU."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.reader import read_record

Algorithm = Literal["nccl", "one_shot", "two_shot"]
NCCL: Algorithm = "nccl"
MIN_RATIO = 1.03
"""How much faster than NCCL an algorithm must be to be used: times that are measured twice differ by up to 3 %."""
DTYPES = ("bfloat16", "float32")
"""Element types that torch's kernels for symmetric memory sum."""
VECTOR_BYTES = 16
"""Bytes that torch's kernels for symmetric memory read at once: addresses and parts of messages are multiples of it."""
_PAIR = 2
"""Ranks of a group whose messages may be pushed: with more, each rank would send its whole message to each other."""
_FILE = Path(__file__).with_name("table.json")


class Row(Frozen):
    """Messages of up to `up_to_bytes` bytes, and more than those of the row before."""

    up_to_bytes: int
    algorithm: Algorithm


class Measured(Frozen):
    """One size: microseconds of an all-reduce in a CUDA graph, by algorithm, with the copies that it needs."""

    size_bytes: int
    us: dict[Algorithm, float]


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
    command: str = ""
    versions: dict[str, str] = {}


class Table(Frozen):
    """Cells of the GPUs that were measured; all others use NCCL."""

    schema_version: int = 1
    cells: tuple[Cell, ...] = ()

    @classmethod
    def read(cls, path: Path | str) -> Table:
        """A file that scripts/bench_all_reduce.py wrote."""
        return read_record(cls, Path(path))

    def write(self, path: Path | str) -> None:
        """Write the file."""
        Path(path).write_text(f"{self.to_json(indent=1)}\n")

    def rows(self, gpu: str, num_ranks: int) -> str:
        """The rows as the op takes them, `65536:nccl 8388608:two_shot`; empty where NCCL sums everything."""
        for cell in self.cells:
            if (cell.gpu, cell.num_ranks) == (gpu, num_ranks):
                return _text(cell.rows)
        return ""

    def push_from(self, gpu: str, num_ranks: int) -> int | None:
        """`push_from_bytes` of the cell; None where there is no cell, and for more than two ranks."""
        found = [cell.push_from_bytes for cell in self.cells if (cell.gpu, cell.num_ranks) == (gpu, num_ranks)]
        return found[0] if found and num_ranks == _PAIR else None

    @property
    def digest(self) -> str:
        """Hash of all rows: equal for tables that choose alike."""
        chosen = [(cell.gpu, cell.num_ranks, _text(cell.rows), cell.push_from_bytes or 0) for cell in self.cells]
        return hashlib.sha256(json.dumps(sorted(chosen)).encode()).hexdigest()[:12]


@cache
def shipped() -> Table:
    """`table.json`; empty without it."""
    return Table.read(_FILE) if _FILE.exists() else Table()


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


def _text(rows: Iterable[Row]) -> str:
    return " ".join(f"{row.up_to_bytes}:{row.algorithm}" for row in rows)


def shown(rows: str, push_from: int | None = None) -> str:
    """The rows for people: `two_shot to 8388608 bytes, nccl above, in flight pushed from 1048576 bytes on`."""
    parts = [f"{row.algorithm} to {row.up_to_bytes} bytes" for row in rows_of(rows)]
    parts.append("nccl above" if parts else "nccl")
    if push_from is not None:
        parts.append(f"in flight pushed from {push_from} bytes on")
    return ", ".join(parts)
