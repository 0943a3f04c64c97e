"""Rows of a preset -> medians, spreads, and ratios that were taken round by round between equal outputs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.bench.records import Measured, Role, Row


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of all rounds, or why there is none."""

    value: float | None
    why_not: str = ""


@dataclass(frozen=True)
class Ratios:
    """The ratios of one program."""

    faster_than_a: Ratio
    """Time of mode A over that of this program."""
    faster_than_peer: Ratio
    """Time of the fastest peer over that of this program."""
    of_floor: Ratio
    """Time of this program over the floor."""
    of_compute: Ratio
    """Time of this program over the fastest compute-only program."""


def median_ms(row: Row) -> float:
    """The median of its rounds."""
    return statistics.median(row.rounds_ms)


def spread_ms(row: Row) -> float:
    """Half of the range between the quartiles."""
    if len(row.rounds_ms) < 2:
        return 0.0
    low, _, high = statistics.quantiles(row.rounds_ms, n=4, method="inclusive")
    return (high - low) / 2


def differs(row: Row, limit: float) -> bool:
    """Its outputs are not those of a single device; those of a program without communication are not compared."""
    if row.role is Role.COMPUTE or not row.rounds_ms:
        return False
    return row.error_ratio is None or not row.error_ratio <= limit  # True for NaN


def failures(measured: Measured) -> list[str]:
    """What makes the run fail, in one line each.

    Outputs that differ, several compiled regions where one is the contract, and an error in any program but a peer.
    """
    found = []
    for row in measured.rows:
        if row.has_failed and row.role is not Role.PEER:
            found.append(f"{measured.preset} {row.name}: {row.why_not}")
        if differs(row, measured.error_limit):
            found.append(f"{measured.preset} {row.name}: {_difference(row, measured.error_limit)}, {row.worst}")
        has_one = row.role in (Role.OURS, Role.COMPUTE) or row.name.partition(":")[0] == "B"
        if has_one and row.regions_per_call not in (None, 1.0):
            entered = f"a call enters {row.regions_per_call:g} compiled regions, not 1"
            found.append(f"{measured.preset} {row.name}: {entered}")
    return found


def ratios_of(measured: Measured, row: Row) -> Ratios:
    """All ratios of a row that was measured."""
    limit = measured.error_limit
    mode_a = fastest([one for one in measured.rows if one.name == "A"])
    computing = fastest([one for one in measured.rows if one.role is Role.COMPUTE])
    return Ratios(
        faster_than_a=_between(mode_a, row, limit),
        faster_than_peer=_between(best_peer(measured, row.reference), row, limit),
        of_floor=_to_floor(measured, row),
        of_compute=_between(row, computing, limit),
    )


def best_peer(measured: Measured, reference: str = "") -> Row | None:
    """The fastest peer whose outputs are right, of those with this reference."""
    peers = [row for row in measured.rows if row.role is Role.PEER and row.reference == reference]
    return fastest([row for row in peers if not differs(row, measured.error_limit)])


def beats_floor(measured: Measured) -> Row | None:
    """The fastest program of the block, if it took less time than the floor: then there is no floor."""
    of_block = [row for row in measured.rows if not row.reference]
    row = fastest([row for row in of_block if not differs(row, measured.error_limit)])
    return row if row is not None and median_ms(row) < measured.bound.ms else None


def fastest(rows: Sequence[Row]) -> Row | None:
    """The row with the smallest median, of those that were measured."""
    timed = [row for row in rows if row.rounds_ms]
    return min(timed, key=median_ms, default=None)


def _between(above: Row | None, below: Row | None, limit: float) -> Ratio:
    """Time of `above` over that of `below`, in each round; none between programs of different models."""
    if above is None or below is None:
        return Ratio(None, why_not="-")
    if above.reference != below.reference:
        return Ratio(None, why_not="-")
    for row in (above, below):
        if differs(row, limit):
            return Ratio(None, why_not=_difference(row, limit))
    pairs = list(zip(above.rounds_ms, below.rounds_ms, strict=False))
    return _ratio([one / other for one, other in pairs])


def _to_floor(measured: Measured, row: Row) -> Ratio:
    limit, floor_ms = measured.error_limit, measured.bound.ms
    if differs(row, limit):
        return Ratio(None, why_not=_difference(row, limit))
    has_floor = not row.reference and beats_floor(measured) is None
    if not has_floor:
        return Ratio(None, why_not="-")
    return _ratio([ms / floor_ms for ms in row.rounds_ms])


def _ratio(values: Sequence[float]) -> Ratio:
    if not values:
        return Ratio(None, why_not="-")
    return Ratio(statistics.median(values))


def _difference(row: Row, limit: float) -> str:
    if row.error_ratio is None:
        return "outputs not compared"
    return f"outputs differ: {row.error_ratio:.3g}x the single-device error, limit {limit:g}x"
