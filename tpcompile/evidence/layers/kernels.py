"""Generated code, forward and backward -> one item per line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.layerspec import Difference, Directness, Explanation, Items, LayerSpec
from tpcompile.evidence.records import CompileRecord, Item, ItemKind, Layer
from tpcompile.evidence.rows import common_keys

_ISSUED = re.compile(r"torch\.ops\._c10d_functional\.(\w+?)_?(?:\.default)?\((?:[^,]*)((?:, [^,]*)*)\)")
_VIEW = re.compile(r"reinterpret_tensor\([^()]*(?:\([^()]*\)[^()]*)*\)")
"""A view of a buffer, at an offset that may follow the rank."""
_BUFFER = re.compile(r"\b(?:buf|arg)\d\w*")
_MATMUL_CHOICE = re.compile(r"extern_kernels\.|_tem_|gemm|mkldnn|aten\.(?:mm|addmm|bmm)|num_warps|num_stages|BLOCK")


def _items(compile_: CompileRecord, part: str) -> Iterator[Item]:
    kernels = [kernel for kernel in compile_.kernels if kernel.phase == part]
    for kernel in kernels:
        for code in kernel.code.splitlines():
            yield Item(kind=ItemKind.CODE, about=kernel.name, fields={"code": code})


def _parts(compile_: CompileRecord) -> Sequence[str]:
    phases = {kernel.phase for kernel in compile_.kernels}
    return [part for part in ("forward", "backward") if part in phases]


def _explain(difference: Difference) -> Explanation:
    hangs = is_reordered(difference.items)
    everywhere = common_keys(difference.items)
    lines = {item.key: item.fields["code"] for group in difference.items for item in group}
    is_chosen = any(_MATMUL_CHOICE.search(lines[key]) for key in lines.keys() - everywhere)
    cause = Cause.AUTOTUNE if is_chosen and not hangs else Cause.COMPILER_PASS
    return Explanation(cause, Directness.LOWERED, difference.rows[0], hangs=hangs)


def is_reordered(items: Items) -> bool:
    """True when the generated code issues other collectives, or the same in another order: a hang."""
    return len({tuple(_issued(group)) for group in items}) > 1


def _issued(items: Sequence[Item]) -> Iterator[tuple[str, str]]:
    for item in items:
        match = _ISSUED.search(_VIEW.sub("buf0", item.fields["code"]))
        if match and "wait_tensor" not in match[1]:
            yield match[1], _BUFFER.sub("%", match[2])


SPEC = LayerSpec(layer=Layer.KERNELS, explain=_explain, items=_items, parts=_parts, is_strict=False)
