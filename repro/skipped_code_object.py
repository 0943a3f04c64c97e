"""Upstream limit: zero graph breaks and `fullgraph=True` do not mean one graph (pytorch 144820 and 132923).

    python repro/skipped_code_object.py

A graph break inside of a loop makes Dynamo skip the *code object* around it for the life of the process. The debug
instance of `Stack` below breaks in its first call. After that every instance of the class runs block by block: as many
compiled regions per call as there are blocks, a graph-break counter of 0, and no complaint from `fullgraph=True`. Seen
with torch 2.11.0 and 2.13.0 on CPU. `torch.compiler.reset()` between the two cures it.

Prints the regions that one call enters; exit status 1 when a call that should be one graph enters more, 0 when not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

NUM_BLOCKS = 4


class Block(nn.Module):
    """A linear layer; the debug variant prints a norm."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.debug = debug

    def forward(self, x: Tensor) -> Tensor:
        """x -> relu(linear(x))."""
        y = self.linear(x)
        if self.debug:
            print(f"norm {y.norm():.3f}")
        return torch.relu(y)


class Stack(nn.Module):
    """Blocks in a loop."""

    def __init__(self, *, debug: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(debug=debug) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """All blocks, one after the other."""
        for block in self.blocks:
            x = block(x)
        return x


def regions_per_call(*, fullgraph: bool) -> tuple[int, int]:
    """(regions that one call of a healthy stack enters, graph breaks that Dynamo counted meanwhile)."""
    entered = 0

    def counting_backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def region(*args: Any) -> Any:
            nonlocal entered
            entered += 1
            return gm.forward(*args)

        return region

    counters.clear()
    stack = torch.compile(Stack(), backend=counting_backend, fullgraph=fullgraph)
    x = torch.ones(2, 8)
    stack(x)
    entered = 0
    stack(x)
    return entered, sum(counters["graph_break"].values())


def main() -> int:
    """Count in a fresh process, after a debug variant broke its graph, and after a reset."""
    found = {"fresh process": regions_per_call(fullgraph=False)}
    torch.compile(Stack(debug=True), backend="eager")(torch.ones(2, 8))
    found["after the debug variant"] = regions_per_call(fullgraph=False)
    found["the same, fullgraph=True"] = regions_per_call(fullgraph=True)
    torch.compiler.reset()
    found["after torch.compiler.reset()"] = regions_per_call(fullgraph=True)
    print(f"torch {torch.__version__}")
    for name, (regions, breaks) in found.items():
        print(f"{name}: {regions} compiled regions per call, {breaks} graph breaks counted")
    return int(any(regions != 1 for regions, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
