"""A module on this rank -> what a user can check: errors against float64, breaks and graphs of a compile.

The same checks judge a mistake and ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.graphs import GraphCapture
from tpcompile.collectives.strategies import Collectives
from tpcompile.config import GateConfig
from tpcompile.numerics.draw import Values, draw_normal
from tpcompile.numerics.error_ratio import Errors
from tpcompile.numerics.single_device import Reference

LIMIT = GateConfig().error_ratio
IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Before torch 2.13."""


def skewed(*shape: int, num_heads: int, values: Values = "skewed", seed: int = 1) -> Callable[[torch.dtype], Any]:
    """Inputs of a reference: one tensor, equal on all ranks, whose heads differ in scale."""
    generator = torch.Generator().manual_seed(seed)
    x = draw_normal(shape, generator, num_heads=num_heads, values=values)
    return lambda dtype: (x.to(dtype),)


def errors_of(
    reference: Reference, comm: Collectives, *, module: nn.Module | None = None, backend: Any = None
) -> Errors:
    """Errors of one call (and backward pass) of this rank's module against the reference; `backend` None is eager."""
    module = reference.place(comm) if module is None else module
    program = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    return reference.errors(module, reference.run(program, module, comm), comm)


def wrong(ranks: Sequence[Errors], *, limit: float = LIMIT) -> dict[str, float]:
    """Tensors off by more than `limit` times the single-device error -> the largest relative error of any rank."""
    found: dict[str, float] = {}
    for rank in ranks:
        for name, value in rank.items():
            if not value["ratio"] <= limit:
                found[name] = max(found.get(name, 0.0), value["error"])
    return found


def compiled_once(program: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Graph texts, their number, breaks and result of one compiled call that may break."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    capture = GraphCapture()
    result = torch.compile(program, backend=capture)(*arguments)
    return {
        "result": result.detach() if isinstance(result, Tensor) else result,
        "texts": capture.texts,
        "collectives": capture.collectives,
        "graphs": sum(kind == "dynamo" for kind, _ in capture.texts),
        "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
    }


@functools.cache
def first_three() -> Collectives | None:
    """Three ranks of four as a group, None on the last one; all four must call.

    Make groups of neighbours (`Collectives.replicas`) before: torch names those after the number of groups that a rank
    is in, which after this call is another one on the last rank.
    """
    group = dist.new_group([0, 1, 2])
    return None if dist.get_rank() == 3 else Collectives(group)


def num_collectives(capture: GraphCapture, phase: str) -> int:
    """Collectives in the AOT graphs of one phase, `forward` or `backward`."""
    return sum(row[0] == phase for row in capture.collectives)
