"""Step -> types of its results: the rule of the op, or the default for ops without one."""

from __future__ import annotations

from tpcompile.typecheck import layout, rules_collective, rules_convolution, rules_matmul, rules_reduce
from tpcompile.typecheck.gradients import join
from tpcompile.typecheck.pending import judge_pending, pending_of
from tpcompile.typecheck.rules_pointwise import pointwise
from tpcompile.typecheck.rules_scale import with_scales
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, ZERO, SpmdType, Types
from tpcompile.typecheck.step import RULES, Result, Step, rule

__all__ = ["judge", "layout", "rules_collective", "rules_convolution", "rules_matmul", "rules_reduce"]


def judge(step: Step) -> Result:
    """Types of the results of an aten, c10d or custom op."""
    pending = pending_of(step)
    result = _judge(step) if pending is None else judge_pending(step, pending, _judge)
    return with_scales(step, result)


def _judge(step: Step) -> Result:
    if step.name in RULES:
        return RULES[step.name](step)
    return pointwise(step) if step.is_pointwise else _unknown_op(step)


def _unknown_op(step: Step) -> Result:
    """Whole results from whole operands, varying ones from varying operands; nothing is reported.

    Of varying operands it may mix what the ranks hold, so it does not count as judged.
    """
    types = step.types
    if types.has("U", "P"):
        return UNKNOWN
    if types.has("V"):
        may_communicate = not step.name.startswith("aten.")
        step.is_judged = False
        return UNKNOWN if may_communicate else SpmdType("V", types.grad)
    if types.with_gradient.kinds == {"I", "R"}:
        return UNKNOWN
    return join(step, types)


@rule("aten.gather")
def _gathered(step: Step) -> Result:
    """Elements by their index along one dim: along the sharded one each rank finds its own."""
    types = step.types
    if types.has("U", "P"):
        return UNKNOWN
    x = step.args[0]
    along = step.arg(1, "dim") % max(1, x.dim())
    kept = Types(type_.keep_dim_if(type_.dim != along) for type_ in types)
    return join(step, kept)


rule("aten.floor_divide")(pointwise)  # elementwise, though torch does not tag it so


@rule("aten.zeros", "aten.zeros_like", "aten.new_zeros")
def _zeros(step: Step) -> Result:
    """Zeros, which may be added to any type."""
    return ZERO


@rule(
    "aten.empty_like", "aten.new_empty", "aten.ones_like", "aten.new_ones", "aten.full_like", "aten.new_full",
    "aten.rand_like", "aten.randn_like", "aten.randint_like", "aten.new_empty_strided",
)  # fmt: skip
def _made(step: Step) -> Result:
    """A constant that takes the shape of its operand, not its values."""
    return CONSTANT
