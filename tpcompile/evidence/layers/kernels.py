"""Generated code, forward and backward -> one item per launch, where fusion was recorded, and one per line."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence

from tpcompile.evidence.groups.by_group import Items
from tpcompile.evidence.groups.by_rank import Groups
from tpcompile.evidence.iterables import find, grouped
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation, LayerSpec
from tpcompile.evidence.records import CompileRecord, Item, ItemKind, Layer, value_item
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks

_ISSUED = re.compile(
    r"(?>.*?torch\.ops\.(?:_c10d_functional\.(?!wait_tensor)|tpcompile\.(?=all_reduce_))"
    r"(\w+?)_?(?:\.default)?\()(?:[^,]*)((?:, [^,]*)*)\)"
)
_VIEW = re.compile(r"reinterpret_tensor\([^()]*(?:\([^()]*\)[^()]*)*\)")
"""A view of a buffer; its offset may depend on the rank."""
_BUFFER = re.compile(r"\b(?:buf|arg)\d\w*")
_TEMPLATE = re.compile(r"tem\b")
_MATMUL_CHOICE = re.compile(r"extern_kernels\.|_tem_|gemm|mkldnn|aten\.(?:mm|addmm|bmm)|num_warps|num_stages|BLOCK")

SOURCE = "source"
"""Kind of the `Kernel` whose code is the hash of a fused kernel's source."""


LAUNCHES = " launches"
"""Ends the name of a part that consists of launches."""
_PARTS = (f"forward{LAUNCHES}", "forward", f"backward{LAUNCHES}", "backward")


def _items(compile_: CompileRecord, part: str) -> Iterator[Item]:
    if part.endswith(LAUNCHES):
        for graph in compile_.launched:
            if graph.phase == part.removesuffix(LAUNCHES):
                yield from graph.launches
        return
    for kernel in compile_.kernels:
        if kernel.phase != part:
            continue
        if kernel.kind == SOURCE:
            yield value_item(kernel.name, kernel.code)
            continue
        for code in kernel.code.splitlines():
            yield Item(kind=ItemKind.CODE, about=kernel.name, fields={"code": code})


def _parts(compile_: CompileRecord) -> Sequence[str]:
    launched = grouped(compile_.launched, lambda graph: f"{graph.phase}{LAUNCHES}")
    observed = {part for part, graphs in launched.items() if all(graph.is_known for graph in graphs)}
    observed.update(kernel.phase for kernel in compile_.kernels)
    return [part for part in _PARTS if part in observed]


def _explain(difference: Difference) -> Explanation:
    row = difference.rows[0]
    if row.first.kind == ItemKind.LAUNCH:
        return _explain_launches(difference)
    hangs = is_reordered(difference.items)
    different_source = find(difference.rows, lambda row: row.first.kind == ItemKind.VALUE)
    if different_source is not None:
        return Explanation(Cause.ENVIRONMENT, Directness.STATE, different_source, hangs=hangs)
    own_code = [item.fields.get("code", "") for item in difference.items.own().all]
    is_chosen = any(map(_MATMUL_CHOICE.search, own_code))
    cause = Cause.COMPILER_PASS
    if is_chosen and not hangs:
        cause = Cause.AUTOTUNE
    return Explanation(cause, Directness.LOWERED, row, hangs=hangs)


def _explain_launches(difference: Difference) -> Explanation:
    """Launches that are one kernel on some ranks and several on others, with the reason."""
    own = difference.items.own(of=operator.attrgetter("says"))
    hangs = is_reordered(difference.compile.items(Layer.KERNELS, difference.compile.phase))
    own_names = own.each(operator.attrgetter("says"))
    is_template = own_names.map(lambda names: any(map(_TEMPLATE.match, names)))
    cause = Cause.COMPILER_PASS
    if is_template.differ() and not hangs:
        cause = Cause.AUTOTUNE
    said = _split(difference.items, own, difference.groups)
    return Explanation(cause, Directness.LOWERED, difference.rows[0], headline=said, hangs=hangs)


def _split(items: Items, own_items: Items, groups: Groups) -> str:
    """`poi add and poi relu are two launches on rank 1: REASON`; empty where no launch of the same ranks says why.

    The groups with the most launches are asked first: what is one kernel elsewhere is several there.
    """
    sides = zip(groups, items, own_items, strict=True)
    for ranks, launches, own in sorted(sides, key=lambda side: -len(side[1])):
        kernels = [item for item in launches if item.fields["writes"]]  # a library call is apart on every rank
        split = _apart_from(own, own) or _apart_from(kernels, own)
        if split is not None:
            pair = f"{split.notes['from']} and {split.says}"
            return f"{pair} are two launches on {named_ranks(ranks)}: {split.notes['apart']}"
    return ""


def _apart_from(launches: Sequence[Item], earlier: Sequence[Item]) -> Item | None:
    """The first of the launches that is kept apart from one of the earlier ones."""
    names = {item.says for item in earlier}
    return find(launches, lambda item: item.notes.get("from") in names)


def is_reordered(items: Items) -> bool:
    """True when the generated code of the ranks issues different collectives, or a different order of them: a hang."""
    return items.differ(_issued)


def _issued(items: Sequence[Item]) -> tuple[tuple[str, str], ...]:
    """Op and arguments of the collectives that lines of code issue, in order."""
    calls = []
    for item in items:
        code = _VIEW.sub("buf0", item.fields.get("code", ""))
        match = _ISSUED.match(code)
        if match is not None:
            arguments = _BUFFER.sub("%", match[2])
            calls.append((match[1], arguments))
    return tuple(calls)


SPEC = LayerSpec(explain=_explain, items=_items, parts=_parts, is_strict=False)
