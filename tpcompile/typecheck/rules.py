"""Step -> types of its results: the rule of the op, or the default for ops without one."""

from __future__ import annotations

from dataclasses import replace

import torch

from tpcompile.typecheck import layout, rules_collective, rules_matmul, rules_reduce
from tpcompile.typecheck.gradients import join
from tpcompile.typecheck.ops import CHOICES, SAME_VALUE, VIEWS
from tpcompile.typecheck.parameters import with_undeclared
from tpcompile.typecheck.pending import judge_pending
from tpcompile.typecheck.positions import with_positions
from tpcompile.typecheck.rules_pointwise import pointwise
from tpcompile.typecheck.rules_scale import with_scales
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, ZERO, SpmdType, Types
from tpcompile.typecheck.step import RULES, Result, Step, rule

__all__ = ["judge", "layout", "rules_collective", "rules_matmul", "rules_reduce"]


_ZEROS = {"aten.zeros", "aten.zeros_like", "aten.new_zeros"}
_MADE = {
    "aten.empty_like", "aten.new_empty", "aten.ones_like", "aten.new_ones", "aten.full_like", "aten.new_full",
    "aten.rand_like", "aten.randn_like", "aten.randint_like", "aten.new_empty_strided",
}  # fmt: skip
"""Constants that take the shape of their operand, not its values."""
_BLIND = {*_ZEROS, *_MADE, "aten.fill", "aten.zero", "aten.copy"}
"""Ops whose results do not have the value of their first operand."""

_LOOKS_UP = {"aten.embedding", "aten.gather", "aten.index"}
_KEEPS_LOOKUPS = {*_LOOKS_UP, *SAME_VALUE, *VIEWS}


def judge(step: Step) -> list[SpmdType]:
    """Types of the results of an aten, c10d or custom op, or of a wrapper call."""
    if step.is_wrapper and not step.is_own_group(step.kwargs["group"]):
        return [rules_collective.over_different_group(step)]
    pending = [type_.pending for type_ in step.types if type_.pending is not None]
    if pending:
        types = judge_pending(step, pending[0], _judge)
    else:
        types = _judge(step)
    types = with_undeclared(step, types)
    types = with_positions(step, types, _judge)
    if step.name not in _KEEPS_LOOKUPS:
        types = [replace(type_, is_lookup=False) for type_ in types]
    if step.is_wrapper:
        return types
    return with_scales(step, types)


def _judge(step: Step) -> list[SpmdType]:
    is_followed = step.name in _BLIND or step.name.startswith("c10d.") or not step.types.has("U")
    if not is_followed:
        return step.typed(UNKNOWN)
    default = pointwise if step.is_pointwise else _unknown_op
    follow = RULES.get(step.name, default)
    return step.typed(follow(step))


def _unknown_op(step: Step) -> Result:
    """Whole results from whole operands, varying ones from varying operands; nothing is reported.

    Of varying operands it may mix what the ranks hold, so it does not count as judged. A wrapper is not followed.
    """
    types = step.types
    if types.has("P") or step.is_wrapper:
        return UNKNOWN
    if types.has("V"):
        step.is_judged = False
        may_communicate = not step.name.startswith("aten.")
        if may_communicate:
            return UNKNOWN
        return SpmdType("V", types.grad)
    if types.with_gradient.kinds == {"I", "R"}:
        return UNKNOWN
    return join(step, types)


@rule("aten.gather")
def _gathered(step: Step) -> Result:
    """Elements by their index along one dim: along the sharded one each rank finds its own."""
    types = step.types
    if types.has("P"):
        return UNKNOWN
    along = step.dim_at(1)
    x, index = step.type_at(0), step.type_at(2)
    found = join(step, Types(type_.keep_dim_if(type_.dim != along) for type_ in types))
    is_lookup = x.is_known_shard and x.dim == along and index.origin.what not in CHOICES
    return replace(found, is_lookup=found.kind == "V" and is_lookup)


@rule("aten.index")
def _indexed(step: Step) -> Result:
    """Elements by numbers along some dims: along the sharded one each rank finds its own."""
    x = step.type_at(0)
    places = [dim for dim, index in enumerate(step.args[1]) if index is not None]
    indices = [step.args[1][dim] for dim in places]
    are_numbers = all(index.dtype == torch.int64 for index in indices)
    if not are_numbers or x.dim not in places or any(step.type_of(index).kind in ("P", "U") for index in indices):
        return _unknown_op(step)
    is_chosen = any(step.type_of(index).origin.what in CHOICES for index in indices)
    return replace(x.with_dim(None), is_lookup=not is_chosen)


@rule("aten.index_put")
def _written_at(step: Step) -> Result:
    """A shard with a constant where a mask says so stays one."""
    x, value = step.type_at(0), step.type_at(2)
    are_masks = all(index is None or index.dtype == torch.bool for index in step.args[1])
    if x.kind != "V" or not are_masks or value.kind != "C":
        return _unknown_op(step)
    return replace(x, is_masked=True)


rule(*_ZEROS)(lambda step: ZERO)
rule(*_MADE)(lambda step: CONSTANT)
