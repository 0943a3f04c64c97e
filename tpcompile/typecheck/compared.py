"""What a run of a program on all ranks shows beside one on one device."""

from __future__ import annotations

from dataclasses import dataclass

from tpcompile.evidence.records import WrongOp

DRAWN = "random numbers"
"""What is wrong where ranks apply their own random numbers to what they hold alike, or to summands."""


@dataclass(frozen=True)
class Numbers:
    """What a run on all ranks shows beside one on one device."""

    is_right: bool = False
    """All outputs are right, and all gradients where they were asked for."""
    wrong: tuple[str, ...] = ()
    """Outputs or gradients that are wrong, e.g. `output 0` or `grad up.weight`."""
    op: WrongOp | None = None
    """Where it begins, where that is known."""
    ranks: tuple[int, ...] = ()
    """Ranks that have it."""
    with_gradients: bool = False
    """Gradients were compared."""
    ungraded: tuple[str, ...] = ()
    """Parameters that have no gradient on one device either: whether they should is not known.
    Empty for a program that records none: it does not train."""
    why_not: str = ""
    """Why the ranks are not compared with one device; empty where they are."""
