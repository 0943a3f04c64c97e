"""Tensors that enter a compiled graph -> one item each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tpcompile.evidence.bygroup import Row
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.layerspec import Difference, Directness, Explanation, LayerSpec, in_one_part
from tpcompile.evidence.records import CompileRecord, InputTensor, Item, ItemKind, Layer

_CAUSES = {
    "dtype": Cause.DTYPE,
    "device": Cause.DISPATCH_KEY,
    "shape": Cause.SHAPE,
    "stride": Cause.STRIDE,
    "requires_grad": Cause.REQUIRES_GRAD,
    "dynamic": Cause.AUTOMATIC_DYNAMIC,
}
"""Field that differs -> cause, the one that says most first."""
_PARAMETERS = "._parameters["
"""In the source of a tensor that is a parameter of a module."""


def _items(compile_: CompileRecord, _part: str) -> Iterator[Item]:
    return map(_item, compile_.inputs)


def _item(tensor: InputTensor) -> Item:
    fields = {
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "stride": tensor.stride,
        "device": tensor.device,
        "requires_grad": str(tensor.requires_grad),
        "dynamic": tensor.dynamic or "none",
    }
    return Item(kind=ItemKind.INPUT, about=tensor.source, fields=fields)


def _parts(compile_: CompileRecord) -> Sequence[str]:
    """Tensors are logged while the frame is traced: of a compile that was cut before its graph, some are missing."""
    is_partial = compile_.is_cut and not compile_.graphs
    return in_one_part(is_observed=bool(compile_.inputs) and not is_partial)


def _explain(difference: Difference) -> Explanation:
    row = difference.rows[0]
    if not row.is_full:
        # A tensor that only one side reads: why is in the program, and this is what is left to say.
        return Explanation(Cause.RANK_BRANCH, Directness.ONE_SIDED, row)
    return Explanation(_cause(row, difference), Directness.FED, row)


def _cause(row: Row, difference: Difference) -> Cause:
    differing = row.differing(_CAUSES)
    if "shape" in differing and difference.compile.is_symbolic().differ():
        return Cause.AUTOMATIC_DYNAMIC
    if differing == ["requires_grad"]:
        return requires_grad_cause(row.first.about)
    return _CAUSES[differing[0]] if differing else Cause.UNKNOWN


def requires_grad_cause(source: str) -> Cause:
    """Cause of a tensor that wants gradients on some ranks only."""
    return Cause.FROZEN_PARAMETER if _PARAMETERS in source else Cause.REQUIRES_GRAD


def shared_cause(sources: Iterable[str]) -> Cause:
    """Cause of tensors that are one object on some ranks only."""
    return Cause.TIED_WEIGHTS if all(_PARAMETERS in source for source in sources) else Cause.ALIAS


SPEC = LayerSpec(layer=Layer.INPUTS, explain=_explain, items=_items, parts=_parts, is_ordered=False)
