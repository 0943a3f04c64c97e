"""Live graph of Inductor -> ops that several kernels compute, and buffers that were made although none had to be.

Lowering computes an op where its result is read, unless that would be too much; there is no log and no hook for it.
Seen on torch 2.11.0 and 2.13.0; `tests/torch_api/test_inlined.py` fails when one of the names moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch._inductor import config as _config
from torch._inductor import ir as _ir
from torch._inductor.virtualized import V

from tpcompile.torch_api import scheduled

_HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
"""On a CPU a result of these that is read twice is made once; torch 2.11 has exp and sigmoid alone."""
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
    in_order = sorted(by_op, key=lambda origin: str(origin.name))
    return [_recomputed(origin, by_op[origin]) for origin in in_order if _is_recomputed(origin, by_op[origin])]


_GENERATED = ("pointwise", "reduction", "template")


def _is_recomputed(origin: Any, nodes: Sequence[Any]) -> bool:
    """Stages of one reduction compute it once."""
    num_results = sum(origin in scheduled.made(one) for one in nodes)
    return len(nodes) > 1 and num_results < 2 and not scheduled.is_view(origin)


def _recomputed(origin: Any, nodes: Iterable[Any]) -> dict[str, Any]:
    return {
        "op": scheduled.op_name(origin),
        "fx": origin.name,
        "nodes": [one.get_name() for one in nodes],
        "lines": scheduled.users_lines([origin]),
    }


def realized(nodes: Iterable[Any]) -> list[dict[str, Any]]:
    """Each pointwise buffer in memory that only generated kernels read, with the limit that made it."""
    found: list[dict[str, Any]] = []
    for one in nodes:
        for part in filter(_could_be_inlined, one.get_nodes()):
            if _is_read_by_others(part, one):
                found += _over_limits(part, part.node.data)
    return found


def _could_be_inlined(part: Any) -> bool:
    data = getattr(part.node, "data", None)
    return isinstance(data, _ir.Pointwise) and part.node.get_name() not in V.graph.get_output_names()


def _is_read_by_others(part: Any, of: Any) -> bool:
    """By generated kernels alone, and by one that it is not part of."""
    own = {inner.get_name() for inner in of.get_nodes()}
    readers = [user.node for output in part.get_outputs() for user in output.users]
    are_generated = all(hasattr(reader, "is_extern") and not _needs_a_buffer(reader) for reader in readers)
    return are_generated and any(reader.get_name() not in own for reader in readers)


def _needs_a_buffer(reader: Any) -> bool:
    return bool(reader.is_extern() or reader.is_template())


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
        limit = _limit(setting, is_on_cpu)
        if number > limit:
            yield {"buffer": buffer, "setting": setting, "text": f"{number} {of}, more than {limit}"}
            return
    if is_on_cpu and heavy:
        yield {"buffer": buffer, "setting": "", "text": f"{heavy[0]}, which a CPU computes once"}


def _limit(setting: str, is_on_cpu: bool) -> int:
    limit = getattr(_config, setting)
    return int(_LIMITS[setting][is_on_cpu] if limit is None else limit)
