"""Tensors that enter a compiled graph -> one item each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from tpcompile.evidence.groups.by_group import Row
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation, LayerSpec, in_one_part
from tpcompile.evidence.records import CompileRecord, Item, ItemKind
from tpcompile.evidence.records.causes import Cause

_CAUSES = {
    "dtype": Cause.DTYPE,
    "device": Cause.DISPATCH_KEY,
    "shape": Cause.SHAPE,
    "stride": Cause.STRIDE,
    "requires_grad": Cause.REQUIRES_GRAD,
    "dynamic": Cause.AUTOMATIC_DYNAMIC,
}
"""Field that differs -> cause, the most telling field first."""
_SIZES = re.compile(r"\bsize=\[(?P<sizes>[\w, ]*)\]")
"""The sizes in the guard on a tensor, with `None` for a size that may be any."""
_PARAMETERS = "._parameters["
"""Part of the source of a tensor that is a parameter of a module."""


def _items(compile_: CompileRecord, _part: str) -> Iterator[Item]:
    # Sizes that the compiled code leaves open, tokens of an expert for example, are `any`: only ranks that meet in a
    # collective of that code need equal ones.
    guards = () if compile_.collectives else compile_.guards
    guarded = ((guard.source, _SIZES.search(guard.expression)) for guard in guards)
    found = {source: match["sizes"] for source, match in guarded if match is not None}
    open_shapes = {source: f"[{sizes.replace('None', 'any')}]" for source, sizes in found.items() if "None" in sizes}
    for tensor in compile_.inputs:
        fields = {
            "dtype": tensor.dtype,
            "shape": open_shapes.get(tensor.source, tensor.shape),
            "stride": tensor.stride,
            "device": tensor.device,
            "requires_grad": str(tensor.requires_grad),
            "dynamic": tensor.dynamic or "none",
        }
        yield Item(kind=ItemKind.INPUT, about=tensor.source, fields=fields)


def _parts(compile_: CompileRecord) -> Sequence[str]:
    """Tensors are logged while the frame is traced: a log that ends before the graph lacks some of them."""
    is_partial = compile_.is_cut and not compile_.graphs
    return in_one_part(is_observed=bool(compile_.inputs) and not is_partial)


def _explain(difference: Difference) -> Explanation:
    row = difference.rows[0]
    if not row.is_full:
        # A tensor that only some ranks read: the reason is in the program, which explains itself where it differs.
        return Explanation(Cause.RANK_BRANCH, Directness.ONE_SIDED, row)
    return Explanation(_cause(row, difference), Directness.FED, row)


def _cause(row: Row, difference: Difference) -> Cause:
    fields = row.differing(_CAUSES)
    if not fields:
        return Cause.UNKNOWN
    if fields == ["requires_grad"]:
        return requires_grad_cause(row.first.about)
    is_dynamic = difference.compile.is_symbolic().differ()
    if is_dynamic and "shape" in fields:
        return Cause.AUTOMATIC_DYNAMIC
    return _CAUSES[fields[0]]


def requires_grad_cause(source: str) -> Cause:
    """Cause of a tensor that requires grad on some ranks only."""
    return Cause.FROZEN_PARAMETER if _PARAMETERS in source else Cause.REQUIRES_GRAD


def shared_cause(sources: Iterable[str]) -> Cause:
    """Cause of tensors that are one object on some ranks only."""
    return Cause.TIED_WEIGHTS if all(_PARAMETERS in source for source in sources) else Cause.ALIAS


SPEC = LayerSpec(explain=_explain, items=_items, parts=_parts, is_ordered=False)
