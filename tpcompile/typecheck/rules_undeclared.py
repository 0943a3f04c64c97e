"""Step and the types of its results -> these types with the undeclared parameter that they are made of.

A parameter without a declared layout is taken for replicated. It may be a shard, and what is made of it partial: only
what no such parameter is in, or what went through a collective, is known to be whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpcompile.typecheck.spmd import SpmdType
from tpcompile.typecheck.step import Step

_ENTERS = ("copy_to_tp", "scatter_single")
"""Wrappers that leave the value as it is, or take a part of it."""


def with_undeclared(step: Step, types: Sequence[SpmdType]) -> list[SpmdType]:
    """The types, each whole one with the last undeclared parameter among the operands; none behind a collective."""
    names = [type_.undeclared for type_ in step.types if type_.undeclared]
    has_own_value = step.is_collective and step.name not in _ENTERS
    if not names or has_own_value:
        return list(types)
    # Only of a whole value it decides anything.
    return [replace(type_, undeclared=names[-1]) if type_.kind in ("I", "R") else type_ for type_ in types]


def is_known_whole(step: Step, x: SpmdType) -> bool:
    """True unless an undeclared parameter decides whether the operand is whole; the step is then not judged."""
    if x.undeclared:
        step.is_judged = False
        step.why_not_judged = f"no layout is declared for parameter {x.undeclared}"
    return not x.undeclared
