"""Two gloo ranks whose inputs differ: what the verdict of an input check prints, writes and raises on each."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from tpcompile.errors import DivergenceError
from tpcompile.preflight import InputCheck, check_setup


def run(folder: str) -> dict[str, Any]:
    """Both verdicts of this rank, as plain data."""
    store = dist.distributed_c10d._get_default_store()
    red = InputCheck(store=store).check(torch.tensor([1.0, 2.0 + dist.get_rank()]), step=3)
    text = io.StringIO()
    red.print(Console(file=text, width=160))
    try:
        raised = str(red.raise_for_status())
    except DivergenceError as error:
        raised = f"{error.exit_code}: {error}"
    path = red.publish(Path(folder) / "run")
    green = check_setup(store=store, timeout_s=60)
    return {
        "printed": text.getvalue(),
        "raised": raised,
        "written": sorted(one.name for one in path.iterdir()) if dist.get_rank() == 0 else [],
        "is_green": green.raise_for_status() is green,
        "summary": red.summary,
    }
