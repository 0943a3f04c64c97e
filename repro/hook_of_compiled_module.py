"""Upstream limit: a hook on the compiled module itself is not in its graph (pytorch 117584, open; 121695).

    python repro/hook_of_compiled_module.py

`torch.compile(module)` calls the hooks of `module` outside of its graph, and compiles each of them apart: two compiled
regions per call, a graph-break counter of 0, and no complaint from `fullgraph=True`. `parallelize_module` puts such a
hook on a root module that `PrepareModuleInput`, `PrepareModuleOutput` or `SequenceParallel` is applied to. Seen with
torch 2.13.0 on CPU. Hooks on submodules are traced. What helps: compile a function that calls the module.

Prints the regions that one call enters; exit status 1 when a call that should be one graph enters more, 0 when not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters


class Doubled(nn.Module):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x -> linear(x)."""
        return self.linear(x)


def hooked() -> nn.Module:
    """A linear layer whose hook doubles its output; a module of torch's own has its hooks in its graph."""
    module = Doubled()
    module.register_forward_hook(lambda module, args, output: output * 2)
    return module


def regions_per_call(program: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """(regions that one call enters, graph breaks that Dynamo counted meanwhile)."""
    entered = 0

    def counting_backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def region(*args: Any) -> Any:
            nonlocal entered
            entered += 1
            return gm.forward(*args)

        return region

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(program, backend=counting_backend, fullgraph=True)
    x = torch.ones(2, 8)
    compiled(x)
    entered = 0
    compiled(x)
    return entered, sum(counters["graph_break"].values())


def main() -> int:
    """Count for the module itself, and for a function that calls it."""
    module = hooked()
    found = {"the module": regions_per_call(module), "a function that calls it": regions_per_call(lambda x: module(x))}
    print(f"torch {torch.__version__}")
    for name, (regions, breaks) in found.items():
        print(f"{name}: {regions} compiled regions per call, {breaks} graph breaks counted")
    return int(any(regions != 1 for regions, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
