"""Rows of a preset -> ratios that were taken round by round between equal outputs, and what fails the run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from tpcompile.bench.records import Measured, Role, Row


class Ratios(NamedTuple):
    """The ratios of one program, as the median of those of all rounds; None where there is no equal to compare with."""

    faster_than_a: float | None
    """Time of mode A over that of this program."""
    faster_than_peer: float | None
    """Time of the fastest peer over that of this program."""
    of_floor: float | None
    """Time of this program over the floor."""
    of_compute: float | None
    """Time of this program over the fastest compute-only program."""


def ratios_of(measured: Measured, row: Row) -> Ratios:
    """All ratios of a row that was measured; outputs of compute only are not those of mode A or of a peer."""
    mode_a = fastest(one for one in measured.rows if one.name == "A")
    computing = fastest(one for one in measured.rows if one.role is Role.COMPUTE)
    peer = best_peer(measured, row.reference)
    if row.role is Role.COMPUTE:
        mode_a = peer = None
    of_floor = None
    has_floor = beats_floor(measured) is None
    if has_floor and not row.reference and not measured.differs(row):
        of_floor = row.median_ms / measured.bound.ms
    return Ratios(
        faster_than_a=_between(measured, mode_a, row),
        faster_than_peer=_between(measured, peer, row),
        of_floor=of_floor,
        of_compute=_between(measured, row, computing),
    )


def _between(measured: Measured, above: Row | None, below: Row | None) -> float | None:
    """Time of `above` over that of `below`, in each round; none between different models or different outputs."""
    if above is None or below is None:
        return None
    is_same_model = above.reference == below.reference
    if not is_same_model or measured.differs(above) or measured.differs(below):
        return None
    rounds = zip(above.rounds_ms, below.rounds_ms, strict=False)
    return statistics.median([ms / other_ms for ms, other_ms in rounds])


def best_peer(measured: Measured, reference: str = "") -> Row | None:
    """The fastest peer whose outputs are right, of those with this reference."""
    peers = [row for row in measured.rows if row.role is Role.PEER and row.reference == reference]
    return fastest(row for row in peers if not measured.differs(row))


def beats_floor(measured: Measured) -> Row | None:
    """The fastest program of the block, if it took less time than the floor: then there is no floor."""
    row = fastest(row for row in measured.rows if not row.reference and not measured.differs(row))
    return row if row is not None and row.median_ms < measured.bound.ms else None


def fastest(rows: Iterable[Row]) -> Row | None:
    """The row with the smallest median, of those that were measured."""
    timed = [row for row in rows if row.rounds_ms]
    return min(timed, key=lambda row: row.median_ms, default=None)


def failures(measured: Measured) -> list[str]:
    """What makes the run fail, in one line each.

    Outputs that differ, several compiled regions where one is the contract, and an error in any program but a peer.
    """
    found = []
    for row in measured.rows:
        whys = []
        if row.has_failed and row.role is not Role.PEER:
            whys.append(row.why_not)
        if measured.differs(row):
            error = "not compared" if row.error_ratio is None else f"{row.error_ratio:.3g}x the single-device error"
            whys.append(f"outputs differ: {error}, limit {measured.error_limit:g}x, {row.worst}")
        is_one_region = row.role in (Role.OURS, Role.COMPUTE) or row.name.partition(":")[0] == "B"
        if is_one_region and row.regions_per_call not in (None, 1.0):
            whys.append(f"a call enters {row.regions_per_call:g} compiled regions, not 1")
        found += [f"{measured.preset} {row.name}: {why}" for why in whys]
    return found
