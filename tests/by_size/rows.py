"""A table with rows for two CPU ranks, so that graphs on CPUs get the op."""

from __future__ import annotations

from tpcompile.by_size import Table
from tpcompile.by_size.table import Cell, Row

LIMIT_BYTES = 4096
ON_CPU = Table(cells=(Cell(gpu="cpu", num_ranks=2, rows=(Row(up_to_bytes=LIMIT_BYTES, algorithm="two_shot"),)),))
IN_FLIGHT = Table(cells=(ON_CPU.cells[0].model_copy(update={"push_from_bytes": 1}),))
"""The same, where sums with work beside them become the two ops for them."""
