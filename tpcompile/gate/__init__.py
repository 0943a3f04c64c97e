"""The in-rank sequence of the gate: capture -> digest -> exchange -> verdict.

sequence.py   start-up, the modes in order, verdict, exit code
modes.py      what modes A, B and C run, phase by phase
reference.py  errors against a float64 single-device reference
measurements.py          what a rank measured of modes A, B and C; torch-free
collective_agreement.py  ranks agree on the collectives of new code before it runs
watch.py      the thread that ends a run in which a rank hangs, has died or has failed
checks.py     digests -> the checks of modes A, B and C; torch-free
replay.py     a run directory -> its verdict again, offline; torch-free
status.py     state of this rank, for the other ranks and to be read after a crash
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpcompile.gate.sequence import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for: checks and replay do without."""
    if name == "run":
        from tpcompile.gate.sequence import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
