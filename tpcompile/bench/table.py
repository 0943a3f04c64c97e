"""A measured preset -> lines of a table, floors and notes."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from tpcompile.bench.ratios import Ratio, beats_floor, best_peer, differs, failures, median_ms, ratios_of, spread_ms
from tpcompile.bench.records import Machine, Measured, Role, Row

_TIMED = f"{'ms':>9}{'+-':>7}{'tokens/s':>10}"
_COUNTED = f"{'kernels':>9}{'launched':>9}{'exposed':>9}{'J':>9}{'GiB':>6}{'compile':>8}{'regions':>8}"
_RATIOS = f"{'x A':>8}{'x peer':>8}{'/ floor':>8}{'/ comp':>8}"
_HEAD = f"{_TIMED}{_COUNTED}{_RATIOS}"


def lines(measured: Measured, machine: Machine, *, world_size: int) -> Iterator[Text]:
    """The head, a row for each program, the floors, and what fails the run."""
    kind = "forward and backward" if measured.train else "forward"
    yield Text(
        f"{measured.preset}: {measured.layers} layers, {measured.tokens} tokens, {measured.dtype}, {kind}, "
        f"tp {world_size}; {machine.device}, torch {machine.torch}",
        style="bold",
    )
    width = 2 + max(len(row.name) for row in measured.rows)
    yield Text(f"{'program':{width}}{_HEAD}", style="bold")
    for row in measured.rows:
        if row.rounds_ms:
            yield Text(
                f"{row.name:{width}}{_row(measured, row)}", style="red" if differs(row, measured.error_limit) else ""
            )
            if differs(row, measured.error_limit):
                yield Text(f"  outputs differ: {_error(row)}x the single-device error in {row.worst}", style="red")
        else:
            yield Text(f"{row.name:{width}} {row.why_not or 'not measured: the run ended before'}", style="dim")
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
    ms = median_ms(row)
    ratios, profile = ratios_of(measured, row), row.profile
    tokens_per_s = None if row.reference else measured.tokens / ms * 1e3  # a different model has tokens of its own
    timed = f"{ms:9.3f}{spread_ms(row):7.3f}{_number(tokens_per_s, 10)}"
    gib = None if row.peak_bytes is None else row.peak_bytes / 2**30
    counted = (
        f"{_number(profile.kernels, 9)}{_number(profile.launches, 9)}{_number(profile.exposed_ms, 9, 3)}"
        f"{_number(row.joules, 9, 3)}{_number(gib, 6, 1)}"
        f"{_number(row.compile_s, 8, 1)}{_number(row.regions_per_call, 8)}"
    )
    shown = [ratios.faster_than_a, ratios.faster_than_peer, ratios.of_floor, ratios.of_compute]
    if row.role is Role.COMPUTE:  # its outputs are not those of the others
        shown[:2] = [Ratio(None, why_not="-")] * 2
    return f"{timed}{counted}{''.join(_ratio(one) for one in shown)}"


def _number(value: float | None, width: int, digits: int = 0) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def _ratio(ratio: Ratio) -> str:
    if ratio.value is not None:
        return f"{ratio.value:8.2f}"
    return f"{'-' if ratio.why_not == '-' else 'differ':>8}"


def _error(row: Row) -> str:
    return "not compared, " if row.error_ratio is None else f"{row.error_ratio:.3g}"


def _power_lines(measured: Measured) -> Iterator[Text]:
    """The programs that kept the GPU at its power limit: there the time of a step is its energy over the limit."""
    if measured.why_no_power:
        yield Text(f"energy of a step is not measured from here on: {measured.why_no_power}")
    powers = {row.name: row.power for row in measured.rows if row.power is not None}
    held = {name: power for name, power in powers.items() if power.at_limit}
    if held:
        first = next(iter(held.values()))
        limit = f"at the power limit of {first.limit_watts:.0f} W, below {first.most_mhz} MHz"
        clocks = [f"{name} {power.watts:.0f} W {power.mhz} MHz" for name, power in held.items()]
        yield Text(f"{limit}: {', '.join(clocks)}")


def _floor_lines(measured: Measured) -> Iterator[Text]:
    floors, least = measured.floors, measured.bound
    faster = beats_floor(measured)
    head = f"floor {least.ms:.4g} ms" if faster is None else f"no floor, {faster.name} takes {median_ms(faster):.4g} ms"
    yield Text(
        f"{head}: FLOPs {least.flops_ms:.4g} ms at {floors.gemm_tflops:.4g} TFLOP/s, "
        f"weights {least.bytes_ms:.4g} ms at {floors.read_gbytes_per_s:.4g} GB/s"
    )
    products = ", ".join(f"{one.name} {one.us:.1f} ({one.tflops:.3g})" for one in floors.products)
    yield Text(f"products of a block, us (TFLOP/s): {products}")
    peer = best_peer(measured)
    if peer is not None:
        yield Text(f"best peer: {peer.name}")
