"""Generated code, forward and backward -> one item per line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from tpcompile.evidence.groups.by_group import Items
from tpcompile.evidence.iterables import first
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation, LayerSpec
from tpcompile.evidence.records import CompileRecord, Item, ItemKind, Kernel, value_item
from tpcompile.evidence.records.causes import Cause

_ISSUED = re.compile(r"torch\.ops\._c10d_functional\.(?!wait_tensor)(\w+?)_?(?:\.default)?\((?:[^,]*)((?:, [^,]*)*)\)")
_VIEW = re.compile(r"reinterpret_tensor\([^()]*(?:\([^()]*\)[^()]*)*\)")
"""A view of a buffer; its offset may depend on the rank."""
_BUFFER = re.compile(r"\b(?:buf|arg)\d\w*")
_MATMUL_CHOICE = re.compile(r"extern_kernels\.|_tem_|gemm|mkldnn|aten\.(?:mm|addmm|bmm)|num_warps|num_stages|BLOCK")

SOURCE = "source"
"""Kind of the `Kernel` whose code is the hash of a fused kernel's source."""


def _items(compile_: CompileRecord, part: str) -> Iterator[Item]:
    kernels = [kernel for kernel in compile_.kernels if kernel.phase == part]
    return itertools.chain.from_iterable(map(_lines, kernels))


def _lines(kernel: Kernel) -> list[Item]:
    if kernel.kind == SOURCE:
        return [value_item(kernel.name, kernel.code)]
    return [Item(kind=ItemKind.CODE, about=kernel.name, fields={"code": code}) for code in kernel.code.splitlines()]


def _parts(compile_: CompileRecord) -> Sequence[str]:
    phases = {kernel.phase for kernel in compile_.kernels}
    return [phase for phase in ("forward", "backward") if phase in phases]


def _explain(difference: Difference) -> Explanation:
    hangs = is_reordered(difference.items)
    different_source = first(row for row in difference.rows if row.first.kind == ItemKind.VALUE)
    if different_source is not None:
        return Explanation(Cause.ENVIRONMENT, Directness.STATE, different_source, hangs=hangs)
    is_chosen = any(_MATMUL_CHOICE.search(item.fields.get("code", "")) for item in difference.items.own().all)
    cause = Cause.AUTOTUNE if is_chosen and not hangs else Cause.COMPILER_PASS
    return Explanation(cause, Directness.LOWERED, difference.rows[0], hangs=hangs)


def is_reordered(items: Items) -> bool:
    """True when the generated code of the ranks issues different collectives, or a different order of them: a hang."""
    return items.differ(_issued)


def _issued(items: Sequence[Item]) -> tuple[tuple[str, str], ...]:
    """Op and arguments of the collectives that lines of code issue, in order."""
    calls = []
    for item in items:
        code = _VIEW.sub("buf0", item.fields.get("code", ""))
        match = _ISSUED.search(code)
        if match is not None:
            arguments = _BUFFER.sub("%", match[2])
            calls.append((match[1], arguments))
    return tuple(calls)


SPEC = LayerSpec(explain=_explain, items=_items, parts=_parts, is_strict=False)
