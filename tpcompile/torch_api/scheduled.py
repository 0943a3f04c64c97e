"""Nodes of Inductor's scheduler -> plain fields: what each reads, writes and computes, and from which line of the user.

Seen on torch 2.11.0 and 2.13.0; `tests/torch_api/test_scheduling.py` fails when one of the names moves. All of it needs
the graph that is being compiled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._inductor import ir as _ir
from torch._inductor import scheduler as _scheduler
from torch._inductor.virtualized import V
from torch.fx import Node as _FxNode

from tpcompile.evidence.text.comments import stack_lines
from tpcompile.evidence.text.lines import innermost

VIEWS = frozenset({
    "view", "reshape", "permute", "transpose", "t", "expand", "slice", "select", "squeeze", "unsqueeze", "as_strided",
    "split", "split_with_sizes", "getitem", "alias", "detach", "_unsafe_view", "unbind", "wait_tensor",
})  # fmt: skip
"""Ops that move no data."""
_NOT_RUN = ("get_index", "constant")
"""Calls in the body of a loop that are not computed for an element."""
_EXCHANGES = frozenset({"_c10d_functional", "c10d", "symm_mem"})
"""Namespaces of ops that communicate; those of the last are plain library calls for Inductor."""
_ALL_REDUCES = "tpcompile.all_reduce_"
"""The ops of ours that are nothing but a collective."""


def generated_nodes() -> list[Any]:
    """The nodes that code was generated for, in order.

    Without those whose work the wrapper does itself, as the second stage of a mix-order reduction.
    """
    scheduler = V.graph.scheduler
    removed = scheduler.removed_ops
    return [one for one in scheduler.nodes if not one.get_operation_names() <= removed]


def parts_of(nodes: Iterable[Any]) -> list[dict[str, Any]]:
    """The nodes that these were made of."""
    return [node(part) for one in nodes for part in one.get_nodes()]


def ungrouped(nodes: Iterable[Any]) -> Iterator[Any]:
    """The nodes of groups in their place; Inductor fuses within a group after all passes."""
    for one in nodes:
        if isinstance(one, _scheduler.GroupedSchedulerNode):
            yield from one.snodes
        else:
            yield one


def is_fused(one: Any) -> bool:
    """True for a node that the rounds of fusion made; a foreach node is made before them."""
    return isinstance(one, _scheduler.FusedSchedulerNode) and not one.is_foreach()


def node(one: Any) -> dict[str, Any]:
    """A node as fields."""
    origins = computed(one)
    lines = users_lines(origins)
    if not lines:  # an op that a pattern made has no line of its own: the ops that Inductor names a kernel after
        claimed = [_called(part.node.get_origins()) for part in _with_buffers(one)]
        lines = users_lines(set[_FxNode]().union(*claimed))
    reads, writes = _accesses(one)
    parts = [part.get_name() for part in one.get_nodes()]
    group, device = getattr(one, "group", None), one.get_device()
    return {
        "name": one.get_name(),
        "kind": kind(one),
        "parts": parts,
        "ops": sorted({op_name(origin) for origin in origins}),
        "body": dict(sorted(_body(one).items())),
        "loops": str(group[1]) if group else "",
        "reads": reads,
        "writes": writes,
        "device": "" if device is None else str(device.type),
        "fx": sorted(origin.name for origin in origins),
        "made": sorted(origin.name for origin in made(one)),
        "lines": lines,
    }


def one_kernel_per_op() -> dict[str, int]:
    """Kernels and bytes if each op of the graph that moves data were a kernel of its own."""
    number = moved = 0
    for op in V.graph.module.graph.nodes:
        if op.op != "call_function" or is_view(op):
            continue
        number += 1
        for value in (op, *op.all_input_nodes):
            moved += _bytes_of_value(value.meta.get("val"))
    return {"kernels": number, "bytes": moved}


def kind(one: Any) -> str:
    """The kind of kernel that a node becomes; `nop`, `output`, `wait`, `print`, `copy` and `collective` are none."""
    if isinstance(one, _scheduler.NopKernelSchedulerNode):
        return "nop"
    if isinstance(one, _scheduler.ExternKernelSchedulerNode):
        return _extern_kind(one.node)
    if one.is_template():
        return "template"
    if one.is_foreach():
        return "foreach"
    return "reduction" if one.is_reduction() else "pointwise"


def _extern_kind(buffer: Any) -> str:
    overload = getattr(buffer, "op_overload", None)
    if isinstance(buffer, _ir.MultiOutput):
        return "output"
    if overload is torch.ops.higher_order.print:
        return "print"
    if isinstance(buffer, _ir._WaitKernel):
        return "wait"
    exchanges = getattr(overload, "namespace", "") in _EXCHANGES or str(overload).startswith(_ALL_REDUCES)
    if exchanges or isinstance(buffer, _ir._CollectiveKernel):
        return "collective"
    if isinstance(buffer, _ir.DeviceCopy):
        return "copy"
    return "triton" if isinstance(buffer, _ir.UserDefinedTritonKernel) else "extern"


# Ops


def _with_buffers(one: Any) -> list[Any]:
    return [part for part in one.get_nodes() if part.node is not None]


def computed(one: Any) -> set[_FxNode]:
    """The ops that a kernel really computes.

    Inductor's origins of a template or an extern kernel also name the ops that made its inputs, in earlier kernels.
    """
    return set[_FxNode]().union(*map(_computed_by_part, _with_buffers(one)))


def made(one: Any) -> set[_FxNode]:
    """The ops whose values its buffers hold; a stage of a reduction that is split holds a part of its op's value."""
    return set[_FxNode]().union(*map(_made_by_part, _with_buffers(one)))


def _made_by_part(part: Any) -> set[_FxNode]:
    origins = _called(part.node.get_origins())
    made_by = part.node.get_origin_node()
    if made_by in origins:
        return {made_by}
    return set(filter(lambda one: origins.isdisjoint(one.users), origins))


def _computed_by_part(part: Any) -> set[_FxNode]:
    """Backward from its result through its origins, as far as the ops whose buffers it reads."""
    origins = _called(part.node.get_origins())
    made_by = part.node.get_origin_node()
    is_one_op = part.is_template() or part.is_extern()
    if made_by is not None and is_one_op:
        return {made_by}
    read = (V.graph.name_to_buffer.get(one.name) for one in part.read_writes.reads)
    buffers = [buffer for buffer in read if buffer is not None]
    inside = origins - {buffer.get_origin_node() for buffer in buffers}
    results = _made_by_part(part)
    first = results & inside or results
    # What the first stage of a split reduction has computed, of which this is the second.
    earlier: set[_FxNode] = set()
    for buffer in buffers:
        is_stage = isinstance(buffer, _ir.ComputedBuffer)
        of_buffer = _called(buffer.get_origins()) if is_stage else set()
        if of_buffer & results:
            earlier |= of_buffer - results
    # What the results are computed from, without leaving `inside`.
    inside -= earlier
    left = list(first)
    found: set[_FxNode] = set()
    while left:
        origin = left.pop()
        found.add(origin)
        left += inside.intersection(origin.all_input_nodes) - found
    return found


def _called(origins: Iterable[_FxNode]) -> set[_FxNode]:
    return {origin for origin in origins if origin.op == "call_function"}


def op_name(origin: _FxNode) -> str:
    """Name of the op that the user's program called, before decomposition."""
    aten = origin.meta.get("original_aten")
    op = aten if isinstance(aten, torch._ops.OpOverload) else origin.target
    if isinstance(op, torch._ops.OpOverload):
        return f"{op.namespace}.{op._overloadpacket.__name__}"
    return str(getattr(op, "__name__", op))


def is_view(origin: _FxNode) -> bool:
    """True for an op that moves no data."""
    packet = getattr(origin.target, "_overloadpacket", origin.target)
    return str(getattr(packet, "__name__", packet)) in VIEWS


def _body(one: Any) -> Counter[str]:
    """How often the loops compute each op for an element, loads and stores included; exact where code is generated."""
    found: Counter[str] = Counter()
    blocks = []
    for part in one.get_nodes():
        body: Any = getattr(part, "_body", None)
        if hasattr(body, "root_block"):  # a library call has no loops
            blocks += [body.root_block, *body.subblocks.values()]
    for block in blocks:
        found.update(call.target for call in block.graph.nodes if call.op == "call_method")
    for target in _NOT_RUN:
        del found[target]
    return found


def users_lines(origins: Iterable[_FxNode]) -> list[dict[str, Any]]:
    """The user's lines of these ops, each once."""
    found = {}
    for origin in sorted(origins, key=lambda one: one.name):
        line = innermost(stack_lines(origin.meta.get("stack_trace") or ""))
        if line is not None:
            found[line.file, line.line] = line.model_dump(mode="json")
    return list(found.values())


# Bytes


_MOST_ELEMENTS = 10**9
"""Inductor counts no more elements of one buffer of a fused node."""


def _accesses(one: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes read and written, by buffer."""
    if one.is_template() and type(one) is _scheduler.SchedulerNode:
        # Inductor counts at most as many elements of a buffer as the output has: 0.9 MB of a weight of 117 MB.
        reads, writes = one.read_writes.reads, one.read_writes.writes
        return _whole(reads), _whole(writes)
    read = one.get_read_write_buffer_accesses(include_reads=True, include_writes=False)
    written = one.get_read_write_buffer_accesses(include_reads=False, include_writes=True)
    is_fused = isinstance(one, _scheduler.FusedSchedulerNode)
    return _numbers(read, is_fused=is_fused), _numbers(written, is_fused=is_fused)


def _numbers(accesses: dict[str, Any], *, is_fused: bool) -> dict[str, int]:
    found = {str(name): int(number) for name, number in sorted(accesses.items())}
    capped = [name for name, number in found.items() if is_fused and number >= _MOST_ELEMENTS]
    return found | {name: max(found[name], _bytes_of_buffer(name)) for name in capped}


def _whole(dependencies: Iterable[Any]) -> dict[str, int]:
    return {name: _bytes_of_buffer(name) for name in sorted({one.name for one in dependencies})}


def sizes(nodes: Iterable[Any]) -> dict[str, int]:
    """Bytes of all tensors that the nodes read."""
    tensors = []
    for one in nodes:
        for dependency in one.read_writes.reads:
            buffer = _buffer(dependency.name)
            # The result of a collective in place, and of an op with several results, has no size.
            if isinstance(buffer, _ir.IRNode) and buffer.maybe_get_size() is not None:
                tensors.append(dependency)
    return _whole(tensors)


def _buffer(name: str) -> Any:
    return V.graph.name_to_buffer.get(name) or V.graph.graph_inputs.get(name)


def _bytes_of_buffer(name: str) -> int:
    buffer = _buffer(name)
    if buffer is None:
        return 0
    elements = math.prod(V.graph.sizevars.optimization_hints(buffer.get_size(), fallback=0))
    return int(elements) * int(buffer.get_dtype().itemsize)


def _bytes_of_value(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of_value, value))
    if not isinstance(value, torch.Tensor):
        return 0
    num_elements = 1
    for size in value.shape:
        is_symbol = not isinstance(size, int)
        num_elements *= int(size.node.hint or 0) if is_symbol else size
    return num_elements * value.dtype.itemsize
