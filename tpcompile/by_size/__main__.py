"""`torchrun -m tpcompile.by_size SETTINGS`: the ranks of `tpcompile tune`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table as ShownTable

from tpcompile.by_size import Table, tuning
from tpcompile.by_size.setting import gpu_of
from tpcompile.by_size.table import Cell, Measured, MeasuredInFlight, shown
from tpcompile.by_size.tuned import Tuned, tuned
from tpcompile.cli import outputs
from tpcompile.errors import ExitCode, TpCompileError
from tpcompile.ranks.env import choose_device, process_group, rank_env
from tpcompile.report import console
from tpcompile.report.stdout import say

_TIMEOUT_S = 120.0


def main(asked: dict[str, Any]) -> int:
    """Measure on this rank; the exit code is the same on all."""
    env = rank_env()
    device = choose_device("cuda", env)
    with process_group(env, device, timeout_s=_TIMEOUT_S) as group:
        command = f"tpcompile tune --nproc {env.world_size}"
        gpu = gpu_of(device)
        return tune(group, gpu, partial(tuning.measure, group, device, gpu, command), asked)


def tune(group: dist.ProcessGroup, gpu: str, measure: Any, asked: dict[str, Any]) -> int:
    """What the ranks have or measure; the first one prints it and writes the files that were asked for."""
    found = tuned(group, gpu, measure, timeout_s=_TIMEOUT_S, anew=asked["anew"])
    if found.cell is None:
        return ExitCode.FAIL
    if group.rank() == 0:
        _report(found, found.cell, asked)
    return ExitCode.PASS


def _report(found: Tuned, cell: Cell, asked: dict[str, Any]) -> None:
    json_file = Path(asked["json"]) if asked["json"] else None
    value = {"cell": cell.model_dump(mode="json"), "measured_s": found.measured_s, "file": str(found.file)}
    if not outputs.put_json(value, json_file):
        for title, measured in (("sum, us", cell.measured), ("product and its sum, us", cell.in_flight)):
            if measured:
                console.stdout().print(_table(title, measured))
        how = "had it already; --anew measures" if found.measured_s is None else f"measured in {found.measured_s:.1f} s"
        say(f"{cell.num_ranks} x {cell.gpu}, {how}; {found.file}")
        say(shown(found.table.rows(cell.gpu, cell.num_ranks), cell.push_from_bytes))
    if asked["write"]:
        path = Path(asked["write"])
        before = Table.read(path) if path.exists() else Table()
        outputs.write_text(path, before.with_cell(cell).to_json(indent=1) + "\n")


def _table(title: str, measured: Sequence[Measured | MeasuredInFlight]) -> ShownTable:
    """A line for each size, a column for each form."""
    table = ShownTable("bytes", *measured[0].us, title=title)
    for one in measured:
        table.add_row(str(one.size_bytes), *(f"{us:.1f}" for us in one.us.values()))
    return table


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except TpCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
