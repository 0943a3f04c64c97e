"""The whole table: op -> rule, and what happens to an op that is not in it."""

from __future__ import annotations

from tpcompile.typecheck import layout
from tpcompile.typecheck import rules_collective, rules_matmul, rules_reduce
from tpcompile.typecheck.gradients import join
from tpcompile.typecheck.rules_pointwise import pointwise
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, SpmdType
from tpcompile.typecheck.step import RULES, Result, Step, rule

__all__ = ["judge", "layout", "rules_collective", "rules_matmul", "rules_reduce"]


def judge(step: Step) -> Result:
    """Types of the results of an aten, c10d or custom op."""
    if step.name in RULES:
        return RULES[step.name](step)
    return pointwise(step) if step.is_pointwise else _unknown_op(step)


def _unknown_op(step: Step) -> Result:
    """Whole from whole, varying from varying, nothing reported."""
    types = [type_ for _, type_ in step.operands()]
    is_custom = not step.name.startswith("aten.")  # which may communicate inside
    if any(t.kind in ("U", "P") or (is_custom and t.kind == "V") for t in types):
        return UNKNOWN
    if any(t.kind == "V" for t in types):
        return SpmdType("V", any(t.grad for t in types))
    if {"I", "R"} <= {t.kind for t in types if t.grad}:
        return UNKNOWN
    return join(step, types)


@rule("aten.zeros", "aten.zeros_like", "aten.new_zeros")
def _zeros(step: Step) -> Result:
    """Zeros, which may be added to anything."""
    return SpmdType("C", is_zero=True)


@rule(
    "aten.empty_like", "aten.new_empty", "aten.ones_like", "aten.new_ones", "aten.full_like", "aten.new_full",
    "aten.rand_like", "aten.randn_like", "aten.randint_like", "aten.new_empty_strided",
)  # fmt: skip
def _made(step: Step) -> Result:
    """A constant with the shape of its operand and none of its values."""
    return CONSTANT
