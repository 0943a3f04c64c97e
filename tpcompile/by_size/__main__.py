"""`torchrun -m tpcompile.by_size SETTINGS`: the ranks of `tpcompile tune`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tpcompile.by_size import Table, tuning
from tpcompile.by_size.setting import gpu_of
from tpcompile.by_size.table import Cell, shown
from tpcompile.by_size.tuned import tuned
from tpcompile.cli import outputs
from tpcompile.errors import ExitCode, TpCompileError
from tpcompile.ranks.env import choose_device, process_group, rank_env
from tpcompile.report.stdout import say

_TIMEOUT_S = 120.0


def main(asked: dict[str, Any]) -> int:
    """Measure on this rank; the exit code is the same on all."""
    env = rank_env()
    device = choose_device("cuda", env)
    gpu, command = gpu_of(device), f"tpcompile tune --nproc {env.world_size}"
    with process_group(env, device, timeout_s=_TIMEOUT_S) as group:
        return tune(group, gpu, partial(tuning.measure, group, device, gpu, command), asked)


def tune(group: dist.ProcessGroup, gpu: str, measure: Callable[[], Cell], asked: dict[str, Any]) -> int:
    """What the ranks have or measure; the first one prints it and writes the files that were asked for."""
    cell = tuned(group, gpu, measure, timeout_s=_TIMEOUT_S, uses_kept=not asked["anew"]).cell(gpu, group.size())
    if cell is None:
        return ExitCode.FAIL
    if group.rank() == 0:
        is_alone = outputs.put_json(cell.model_dump(mode="json"), Path(asked["json"]) if asked["json"] else None)
        if not is_alone:
            _print(cell)
        if asked["write"]:
            path = Path(asked["write"])
            before = Table.read(path) if path.exists() else Table()
            outputs.write_text(path, before.with_cell(cell).to_json(indent=1) + "\n")
    return ExitCode.PASS


def _print(cell: Cell) -> None:
    for title, measured in (("sum, us", cell.measured), ("product and its sum, us", cell.in_flight)):
        for one in measured[:1]:
            say(f"{title:>24}" + "".join(f"{name:>13}" for name in one.us))
        for one in measured:
            say(f"{one.size_bytes:>18} bytes" + "".join(f"{us:>13.1f}" for us in one.us.values()))
    rows = shown(Table(cells=(cell,)).rows(cell.gpu, cell.num_ranks), cell.push_from_bytes)
    say(f"{cell.num_ranks} x {cell.gpu}, measured by `{cell.command}`: {rows}")


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except TpCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
