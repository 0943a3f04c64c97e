"""A measured preset -> lines of a table, floors and notes."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from tpcompile.bench.ratios import beats_floor, best_peer, failures, ratios_of
from tpcompile.bench.records import Machine, Measured, Row

_COLUMNS = {
    "ms": (9, 3), "+-": (7, 3), "tokens/s": (10, 0), "kernels": (9, 0), "launched": (9, 0), "exposed": (9, 3),
    "J": (9, 3), "GiB": (6, 1), "compile": (8, 1), "regions": (8, 0),
    "x A": (8, 2), "x peer": (8, 2), "/ floor": (8, 2), "/ comp": (8, 2),
}  # fmt: skip
"""Head -> width and digits."""


def lines(measured: Measured, machine: Machine, *, world_size: int) -> Iterator[Text]:
    """The head, a row for each program, the floors, and what fails the run."""
    kind = "forward and backward" if measured.train else "forward"
    yield Text(
        f"{measured.preset}: {measured.layers} layers, {measured.tokens} tokens, {measured.dtype}, {kind}, "
        f"tp {world_size}; {machine.device}, torch {machine.torch}",
        style="bold",
    )
    width = 2 + max(len(row.name) for row in measured.rows)
    heads = "".join(f"{head:>{column}}" for head, (column, _) in _COLUMNS.items())
    yield Text(f"{'program':{width}}{heads}", style="bold")
    for row in measured.rows:
        if not row.rounds_ms:
            yield Text(f"{row.name:{width}} {row.why_not or 'not measured: the run ended before'}", style="dim")
            continue
        yield Text(f"{row.name:{width}}{_row(measured, row)}", style="red" if measured.differs(row) else "")
    yield from _power_lines(measured)
    yield from _floor_lines(measured)
    for row in measured.rows:
        for note in row.notes:
            yield Text(f"{row.name}: {note}")
    if measured.ended_early:
        yield Text(f"ended early: {measured.ended_early}", style="red")
    for failure in failures(measured):
        yield Text(f"FAIL {failure}", style="red")


def _row(measured: Measured, row: Row) -> str:
    profile, ratios = row.profile, ratios_of(measured, row)
    values: tuple[float | str | None, ...] = (
        row.median_ms,
        row.spread_ms,
        None if row.reference else measured.tokens / row.median_ms * 1e3,  # a different model has tokens of its own
        profile.kernels,
        profile.launches,
        profile.exposed_ms,
        None if row.power is None else row.power.joules,
        None if row.peak_bytes is None else row.peak_bytes / 2**30,
        row.compile_s,
        row.regions_per_call,
        *(["differ"] * len(ratios) if measured.differs(row) else ratios),
    )
    cells = []
    for value, (width, digits) in zip(values, _COLUMNS.values(), strict=True):
        text = f"{value:.{digits}f}" if isinstance(value, (int, float)) else value or "-"
        cells.append(f"{text:>{width}}")
    return "".join(cells)


def _power_lines(measured: Measured) -> Iterator[Text]:
    """The programs that kept the GPU at its power limit: there the time of a step is its energy over the limit."""
    if measured.why_no_power:
        yield Text(f"energy of a step is not measured from here on: {measured.why_no_power}")
    clocks = []
    for row in measured.rows:
        power = row.power
        if power is not None and power.at_limit:
            limit = f"at the power limit of {power.limit_watts:.0f} W, below {power.most_mhz} MHz"
            clocks.append(f"{row.name} {power.watts:.0f} W {power.mhz} MHz")
    if clocks:
        yield Text(f"{limit}: {', '.join(clocks)}")


def _floor_lines(measured: Measured) -> Iterator[Text]:
    floors, least = measured.floors, measured.bound
    faster = beats_floor(measured)
    head = f"floor {least.ms:.4g} ms" if faster is None else f"no floor, {faster.name} takes {faster.median_ms:.4g} ms"
    yield Text(
        f"{head}: FLOPs {least.flops_ms:.4g} ms at {floors.gemm_tflops:.4g} TFLOP/s, "
        f"weights {least.bytes_ms:.4g} ms at {floors.read_gbytes_per_s:.4g} GB/s"
    )
    products = ", ".join(f"{one.name} {one.us:.1f} ({one.tflops:.3g})" for one in floors.products)
    yield Text(f"products of a block, us (TFLOP/s): {products}")
    peer = best_peer(measured)
    if peer is not None:
        yield Text(f"best peer: {peer.name}")
