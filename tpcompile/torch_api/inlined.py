"""Live graph of Inductor -> ops that several kernels compute, and buffers that were made although none had to be.

Lowering computes an op where its result is read, unless that would be too much; there is no log and no hook for it.
Seen on torch 2.11.0 and 2.13.0; `tests/torch_api/test_inlined.py` fails when one of the names moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torch._inductor import config as _config
from torch._inductor import ir as _ir
from torch._inductor.virtualized import V

from tpcompile.torch_api import scheduled

_GENERATED = ("pointwise", "reduction", "template")
"""Kinds of nodes that Inductor generates code for."""
_HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
"""Ops whose result is made once on a CPU although it is read twice; torch 2.11 has exp and sigmoid alone."""
_LIMITS = {
    "realize_reads_threshold": (4, 4),
    "realize_opcount_threshold": (30, 50),
}
"""Setting -> its default for a GPU and for the CPU, where the setting is None."""


def recomputed(nodes: Iterable[Any]) -> list[dict[str, Any]]:
    """Each op that moves data and that several kernels compute, with the nodes and the user's line."""
    by_op: dict[Any, list[Any]] = defaultdict(list)
    generated = [one for one in nodes if scheduled.kind(one) in _GENERATED]
    for one in generated:
        for origin in scheduled.computed(one):
            by_op[origin].append(one)
    found = []
    for origin in sorted(by_op, key=lambda origin: str(origin.name)):
        computing = by_op[origin]
        num_results = sum(origin in scheduled.made(one) for one in computing)
        is_in_stages = num_results > 1  # the stages of one reduction compute an op once
        if len(computing) == 1 or is_in_stages or scheduled.is_view(origin):
            continue
        found.append(
            {
                "op": scheduled.op_name(origin),
                "fx": origin.name,
                "nodes": [one.get_name() for one in computing],
                "lines": scheduled.users_lines([origin]),
            }
        )
    return found


def realized(nodes: Iterable[Any]) -> list[dict[str, Any]]:
    """Each pointwise buffer in memory that only generated kernels read, with the limit that made it."""
    found: list[dict[str, Any]] = []
    outputs = V.graph.get_output_names()
    for one in nodes:
        for part in one.get_nodes():
            is_pointwise = isinstance(getattr(part.node, "data", None), _ir.Pointwise)
            could_be_inlined = is_pointwise and part.node.get_name() not in outputs
            if could_be_inlined and _is_read_by_others(part, one):
                found += _over_limits(part, part.node.data)
    return found


def _is_read_by_others(part: Any, of: Any) -> bool:
    """True where generated kernels alone read the part's result, and one of them is not `of`, which computes it."""
    own = {inner.get_name() for inner in of.get_nodes()}
    is_read = False
    for output in part.get_outputs():
        for user in output.users:
            reader = user.node
            if not hasattr(reader, "is_extern"):  # an output of the graph
                return False
            if reader.is_extern() or reader.is_template():
                return False
            is_read = is_read or reader.get_name() not in own
    return is_read


def _over_limits(part: Any, data: Any) -> Iterator[dict[str, Any]]:
    """The first limit that is exceeded; none where the buffer was made for a different reason."""
    is_on_cpu = part.get_device().type == "cpu"
    counts = data.inner_fn_opcount()
    buffer = part.node.get_name()
    heavy = sorted(_HEAVY & set(counts.used_ops))
    for setting, number, of in (
        ("realize_reads_threshold", data.num_reads(), "reads"),
        ("realize_opcount_threshold", counts.num_ops, "ops"),
    ):
        limit = getattr(_config, setting)
        if limit is None:
            limit = _LIMITS[setting][is_on_cpu]
        if number > limit:
            text = f"{number} {of}, more than {limit}"
            yield {"buffer": buffer, "setting": setting, "text": text}
            return
    if is_on_cpu and heavy:
        yield {"buffer": buffer, "setting": "", "text": f"{heavy[0]}, which a CPU computes once"}
