"""Backends, passes and autotuning that the planted programs wrap; private names, seen on torch 2.11.0 and 2.13.0.

    name                                    why
    _dynamo.backends.debugging.aot_eager    the backend a program wraps
    _inductor.custom_graph_pass             post-grad passes that differ on one rank
    select_algorithm.add_preprocessing_fn   autotuning that chooses a different kernel on one rank
    aten_distributed_optimizations          Inductor's own comparison of ranks, 2.13 only

`tests/faults/test_backends.py` fails when torch moves one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager as _aot_eager
from torch._inductor import config as _inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

AUTOTUNE = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,TRITON,ATEN"}
"""Inductor options under which a batched matmul has more than one candidate, on a CPU too."""


def aot_eager(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Compile with the `aot_eager` backend."""
    return _aot_eager(module, inputs)


def switch_on_spmd_check() -> None:
    """Inductor's own comparison of ranks, as an error; it runs only where overlap scheduling does."""
    settings = _inductor_config.aten_distributed_optimizations
    settings.spmd_check = True
    settings.spmd_mismatch = "error"
    settings.enable_overlap_scheduling = True


class SwapCollectives(CustomGraphPass):
    """Moves the first all-gather and its inputs in front of the first all-reduce."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Edit the graph in place."""
        reduces = [node for node in graph.nodes if _is(node, "all_reduce")]
        gathers = [node for node in graph.nodes if _is(node, "all_gather_into_tensor")]
        if not gathers:
            return
        gather = gathers[0]
        for node in [*gather.all_input_nodes, gather]:
            if node.op == "call_function":
                reduces[0].prepend(node)

    def uuid(self) -> str:
        """Part of the cache key."""
        return "tpcompile-corpus-swap"


class MergeReduces(CustomGraphPass):
    """Two all-reduces of equal shape become one of twice the size."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Edit the graph in place."""
        first, second = (node for node in graph.nodes if _is(node, "all_reduce"))
        waits = [next(iter(node.users)) for node in (first, second)]
        with graph.inserting_before(second):
            joined = graph.call_function(torch.ops.aten.cat.default, ([first.args[0], second.args[0]],))
            reduced = graph.call_function(first.target, (joined, *first.args[1:]))
            waited = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,))
            rows = first.meta["val"].shape[0]
            for index, wait in enumerate(waits):
                part = graph.call_function(torch.ops.aten.slice.Tensor, (waited, 0, index * rows, (index + 1) * rows))
                wait.replace_all_uses_with(part)
        for node in (*waits, first, second):
            graph.erase_node(node)

    def uuid(self) -> str:
        """Part of the cache key."""
        return "tpcompile-corpus-merge"


def _is(node: torch.fx.Node, op: str) -> bool:
    return node.op == "call_function" and str(node.target).startswith(f"_c10d_functional.{op}")


def autotune_keeps(*, extern: bool) -> None:
    """Autotuning keeps the library's candidates, or the generated ones, as timings on this rank would."""
    from torch._inductor import select_algorithm as _select  # all of Inductor: 3 s of CPU time

    def keep(choices: Sequence[Any]) -> list[Any]:
        kept = [choice for choice in choices if isinstance(choice, _select.ExternKernelCaller) == extern]
        return kept or list(choices)

    _select.add_preprocessing_fn(keep)
