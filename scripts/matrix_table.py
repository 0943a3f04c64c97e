"""JSON files of scripts/correctness_matrix.py -> a Markdown table of worst ratios, a row per form.

python scripts/matrix_table.py results/h200x4-correctness-*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(cells: list[dict[str, Any]]) -> str:
    """A row per form; a column per tp, dtype and program, with the worst ratio over all tensors and ranks."""
    columns = sorted({(c["tp"], c["dtype"], c["program"]) for c in cells}, key=lambda c: (c[1] != "float32", *c))
    found = {(c["form"], c["tp"], c["dtype"], c["program"]): c for c in cells}
    lines = ["| form | " + " | ".join(f"tp {tp} {dtype} {program}" for tp, dtype, program in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for form in dict.fromkeys(c["form"] for c in cells):
        row = [found.get((form, *column)) for column in columns]
        lines.append(f"| {form} | " + " | ".join("" if c is None else _text(c) for c in row) + " |")
    return "\n".join(lines)


def _text(cell: dict[str, Any]) -> str:
    return f"{float(cell['ratio']):.2f}" if cell["passed"] else f"**{cell['ratio']}**"


if __name__ == "__main__":
    print(table([cell for path in sys.argv[1:] for cell in json.loads(Path(path).read_text())["cells"]]))
