"""Step and the types of its results -> these types with the undeclared parameter that they are made of.

A parameter without a declared layout is taken for replicated. It may be a shard, and what is made of it partial: only
what no such parameter is in, or what went through a collective, is known to be whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpcompile.typecheck.ops import FUNCTIONAL
from tpcompile.typecheck.spmd import SpmdType
from tpcompile.typecheck.step import Step

_ENTERS = ("copy_to_tp", "scatter_single")
"""Wrappers that leave the value as it is, or take a part of it."""


def with_undeclared(step: Step, types: Sequence[SpmdType]) -> list[SpmdType]:
    """The types, each whole one with the last undeclared parameter among the operands; none behind a collective."""
    names = [type_.undeclared for type_ in step.types if type_.undeclared]
    if not names or _communicates(step):
        return list(types)
    return [_made_of(names[-1], type_) for type_ in types]


def _communicates(step: Step) -> bool:
    """True for a collective: the value of its result is not that of the operand."""
    if step.is_wrapper:
        return step.name not in _ENTERS
    return step.name in FUNCTIONAL or step.name.startswith("c10d.")


def _made_of(name: str, type_: SpmdType) -> SpmdType:
    """The type of what is made of this parameter; only of a whole value it decides anything."""
    if type_.kind not in ("I", "R"):
        return type_
    return replace(type_, undeclared=name)


def is_known_whole(step: Step, x: SpmdType) -> bool:
    """True unless an undeclared parameter decides whether the operand is whole; the step is then not judged."""
    if x.undeclared:
        step.is_judged = False
        step.why_not_judged = f"no layout is declared for parameter {x.undeclared}"
    return not x.undeclared
