"""torch.compile -> the graphs it made, for tests: Dynamo's, and the AOT forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float64: "f64"}


class GraphCapture:
    """A torch.compile backend that runs the AOT graphs eagerly and keeps all graphs as text and collectives."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, str]] = []
        """(`dynamo` | `forward` | `backward`, graph text)."""
        self.collectives: list[tuple[str, str, str, str, str]] = []
        """(phase, op, reduce op, dtype, shape of the operand) of the AOT graphs, in order."""

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        self.texts.append(("dynamo", graph.print_readable(print_output=False)))
        aot = aot_autograd(fw_compiler=self._keep("forward"), bw_compiler=self._keep("backward"))
        return aot(graph, inputs)

    def _keep(self, phase: str) -> Callable[[GraphModule, Sequence[Any]], Any]:
        def compiler(graph: GraphModule, _: Sequence[Any]) -> Any:
            self.texts.append((phase, graph.print_readable(print_output=False)))
            for node in graph.graph.nodes:
                packet = str(node.target)
                if packet.startswith("_c10d_functional.") and "wait_tensor" not in packet:
                    value = node.args[0].meta["val"]
                    op = packet.split(".")[1]
                    reduce_op = next((str(arg) for arg in node.args[1:] if arg in ("sum", "avg", "max", "min")), "")
                    row = (phase, op, reduce_op, _DTYPES[value.dtype], str(list(value.shape)))
                    self.collectives.append(row)
            return make_boxed_func(graph.forward)

        return compiler
