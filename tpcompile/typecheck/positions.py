"""Constants that count from 0 on every rank -> local positions beside a shard of the same dim, which are wrong.

Such a constant is followed with the type that it would have as a shard: V(dim), with the dim along which it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from tpcompile.typecheck import wording
from tpcompile.typecheck.ops import LABELS, PACKS, SAME_VALUE, SCALINGS, SUMS, VIEWS
from tpcompile.typecheck.spmd import UNKNOWN, SpmdType, varying
from tpcompile.typecheck.step import Step

Judge = Callable[[Step], list[SpmdType]]
_CUTS = {"aten.slice", "aten.narrow", "aten.split", "aten.split_with_sizes", "aten.chunk"}
_COMPARED = {"aten.ge", "aten.gt", "aten.le", "aten.lt"}
_KEEPS = {
    *SAME_VALUE, *(VIEWS - _CUTS), *SCALINGS, *LABELS, *PACKS, "aten.cos", "aten.sin", "aten.exp", "aten.pow",
    "aten.neg", "aten.logical_not", "aten.bitwise_not", "aten.embedding", "aten.masked_fill", "aten.where",
}  # fmt: skip
_BESIDE = {*SUMS, *SCALINGS, "aten.where", "aten.masked_fill"}
_ATTENTION = "aten._scaled_dot_product"


def with_positions(step: Step, types: Sequence[SpmdType], judge: Judge) -> list[SpmdType]:
    """The types, each whole one with the dim along which it counts; a violation beside a shard of this dim."""
    if step.name == "aten.arange":
        start = step.args[0] if len(step.args) > 1 else 0
        return [replace(type_, positions=varying(0) if start == 0 else None) for type_ in types]
    if step.name in ("aten.tril", "aten.triu"):
        # The rows of a causal mask count from the rank's own first row; one of a later rank has a larger diagonal.
        is_at_origin = step.arg(1, "diagonal", 0) in (0, 1)
        rows = varying(step.args[0].dim() - 2) if is_at_origin else None
        return [replace(type_, positions=rows if type_.kind == "C" else None) for type_ in types]
    plain = [replace(type_, positions=None) for type_ in types]
    counting = [tensor for tensor in step.operands if step.type_of(tensor).positions is not None]
    if not counting:
        return plain
    if any(_is_beside_its_shard(step, tensor) for tensor in counting):
        step.flag(wording.LOCAL_NUMBERS)
        return step.typed(UNKNOWN)
    found = _followed(step, counting, judge)
    return [replace(type_, positions=found) if type_.is_whole else type_ for type_ in plain]


def _followed(step: Step, counting: Sequence[Tensor], judge: Judge) -> SpmdType | None:
    """The type of the result as a shard; None where an op may have moved what it counts from."""
    if step.name in _COMPARED and len(counting) == 2:
        # Queries beside keys: the mask counts along the queries, which come first.
        places = [_from_the_right(tensor, step.type_of(tensor).positions) for tensor in counting]
        return varying(step.out.dim() + min(places)) if min(places) < max(places) else None
    is_of_several = len({id(tensor) for tensor in counting}) > 1
    if step.name not in _KEEPS or (is_of_several and step.name not in PACKS):
        return None

    def as_shard(tensor: Tensor) -> SpmdType:
        type_ = step.type_of(tensor)
        return type_.positions or replace(type_, kind="C", grad=False)

    shadow = replace(step, type_of=as_shard, violations=[])
    found = judge(shadow)
    is_shard = bool(found) and found[0].is_known_shard and not shadow.violations
    return found[0] if is_shard else None


def _from_the_right(tensor: Tensor, type_: SpmdType | None) -> int:
    assert type_ is not None and type_.dim is not None
    return type_.dim - tensor.dim()


def _is_beside_its_shard(step: Step, counting: Tensor) -> bool:
    """On the first rank it counts from the right number."""
    is_elementwise = step.is_pointwise or step.name in _BESIDE or step.name.startswith(_ATTENTION)
    if step.rank == 0 or not is_elementwise:
        return False
    place = _from_the_right(counting, step.type_of(counting).positions)
    return any(_is_shard_at(tensor, step.type_of(tensor), place, counting) for tensor in step.operands)


def _is_shard_at(tensor: Tensor, type_: SpmdType, place: int, counting: Tensor) -> bool:
    if not type_.is_known_shard or type_.left > 1 or not tensor.dtype.is_floating_point:
        return False
    is_same_dim = _from_the_right(tensor, type_) == place
    return is_same_dim and counting.shape[place] == tensor.shape[place] > 1
