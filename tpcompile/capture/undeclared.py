"""Compiled graphs -> custom ops and user Triton kernels that nobody declared TP-aware.

Default deny: a fused kernel that sees one shard computes a local mean where a global one was meant, and no digest
can notice, because it is wrong in the same way on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tpcompile.torch_api import compiler as compat
from tpcompile.evidence.collectives import blamed_line
from tpcompile.evidence.records import CompileRecord, Item, Node, value_item

TORCH_NAMESPACES = frozenset({
    "aten", "prim", "prims", "higher_order", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional",
    "c10d", "_dtensor", "inductor", "rngprims", "quantized", "quantized_decomposed", "mkldnn", "mkl", "onednn",
    "sym_size", "_inductor_test", "_quantized", "profiler", "debugprims", "static_input",
})  # fmt: skip
"""Namespaces of torch itself; symm_mem is not among them, its fused ops make TP assumptions of their own."""

_OP = re.compile(r"^torch\.ops\.(\w+)\.(\w+)")
_TRITON = re.compile(r"triton_kernel_wrap|triton_kernel_wrapper")


def undeclared_ops(compiles: Iterable[CompileRecord], *, declared: Iterable[str]) -> tuple[Item, ...]:
    """Each undeclared op or kernel once: `namespace::op` or `module.kernel`, and the user's line."""
    allowed = set(declared)
    found: dict[str, Item] = {}
    for compile_ in compiles:
        for graph in compile_.graphs:
            nodes = list(graph.nodes)
            for index, node in enumerate(nodes):
                name = foreign_name(node)
                if name and name not in allowed and name.rpartition(".")[2] not in allowed:
                    found.setdefault(
                        name, value_item(name, f"in the {graph.kind} graph", line=blamed_line(nodes, index))
                    )
    return tuple(found[name] for name in sorted(found))


def foreign_name(node: Node) -> str:
    """Name of a custom op or user Triton kernel, empty for torch's own nodes."""
    match = _OP.match(node.target)
    if node.op != "call" or not match:
        return ""
    if _TRITON.search(node.target):
        index = dict(node.kwargs).get("kernel_idx", "")
        return compat.triton_kernel_name(int(index)) if index.isdigit() else "triton kernel"
    return "" if match[1] in TORCH_NAMESPACES else f"{match[1]}::{match[2]}"
