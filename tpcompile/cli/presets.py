"""`tpcompile presets`: what `--preset` takes."""

from __future__ import annotations


def presets() -> None:
    """List the presets with their sizes."""
    from rich.console import Console
    from rich.table import Table

    from tpcompile import config

    headings = ("style", "dim", "num_heads", "num_kv_heads", "ffn_dim", "num_layers", "seq_len", "dtype")
    table = Table("preset", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading.removeprefix("num_"), justify="right")
    for name in config.preset_paths():
        block = config.load(name).block
        table.add_row(name, *(str(getattr(block, heading)) for heading in headings))
    Console().print(table)
