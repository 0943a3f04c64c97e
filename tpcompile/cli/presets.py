"""`tpcompile presets`: what `--preset` takes."""

from __future__ import annotations

import sys

_WIDE = 10_000
"""Columns of a pipe: nothing is folded there."""


def presets() -> None:
    """List the presets with their sizes."""
    from rich.console import Console
    from rich.table import Table

    from tpcompile import config
    from tpcompile.report.stdout import say

    headings = ("style", "dim", "num_heads", "num_kv_heads", "ffn_dim", "num_layers", "seq_len", "dtype")
    table = Table("preset", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix("num_"), justify="right")
    for name in config.preset_paths():
        block = config.load(name).block
        table.add_row(name, *(str(getattr(block, heading)) for heading in headings))
    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else _WIDE, force_terminal=is_terminal)
    with console.capture() as text:
        console.print(table)
    for line in text.get().splitlines():
        say(line.rstrip())
