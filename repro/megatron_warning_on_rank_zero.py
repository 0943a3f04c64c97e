"""Upstream: megatron-core warns on rank 0 inside compiled code, so the graph breaks there and on no other rank.

    torchrun --standalone --nproc-per-node 2 repro/megatron_warning_on_rank_zero.py

`get_tensor_model_parallel_group_if_none` is called in the forward of the parallel layers and of the regions that reduce
and gather. Without a `tp_group` it calls `warnings.warn` where `torch.distributed.get_rank() == 0`. Dynamo knows the
rank when it traces and does not know `warnings.warn`: rank 0 breaks the graph and runs the layer as two regions, all
other ranks have one. Seen with megatron-core 0.16.1, torch 2.13.0 on CPU; no upstream issue was found. What helps:
pass the group, or `torch._dynamo.config.ignore_logging_functions.add(warnings.warn)` on all ranks.

Prints the graphs and breaks of each rank; exit status 1 when they differ.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch._dynamo.utils import counters


def graphs_and_breaks(*, is_ignored: bool) -> list[tuple[int, int]]:
    """(graphs, graph breaks) of each rank, for one call of a compiled function that reduces over the group."""
    torch.compiler.reset()
    counters.clear()
    functions = {warnings.warn} if is_ignored else set()
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def layer(x: Tensor) -> Tensor:
        return reduce_from_tensor_model_parallel_region(x * 2) + 1

    with torch._dynamo.config.patch(ignore_logging_functions=functions):
        layer(torch.ones(4))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (len(compiled), sum(counters["graph_break"].values())))
    return found


def main() -> int:
    """As it is, and with the function ignored."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    found = {"as it is": graphs_and_breaks(is_ignored=False), "ignored": graphs_and_breaks(is_ignored=True)}
    if dist.get_rank() == 0:
        for name, ranks in found.items():
            print(f"{name}: (graphs, breaks) of each rank: {ranks}")
    dist.destroy_process_group()
    return int(len(set(found["as it is"])) > 1)


if __name__ == "__main__":
    sys.exit(main())
