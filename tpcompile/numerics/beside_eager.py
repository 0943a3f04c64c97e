"""A call of compiled code -> the first of its graphs that is given right inputs and returns wrong values.

Each graph runs twice: its compiled code, and the graph node by node in eager. The program goes on with the values of
the latter, so an error does not reach a later graph, and all ranks issue the collectives of both in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tpcompile.numerics import error_ratio
from tpcompile.numerics.wrong_op import tolerance_of
from tpcompile.torch_api.comparing import Compiled, Graph, PutBack, copied_input, put_back_random
from tpcompile.torch_api.compiler import settled

_MOST = 4
"""Wrong graphs that are kept: each has the values of all its nodes."""
Values = dict[str, Any]
"""Name of a node -> its value."""


def is_wrong(got: Any, wanted: Any) -> bool:
    """True where a value is further from the right one than rounding explains."""
    if not isinstance(got, Tensor) or not isinstance(wanted, Tensor):
        return isinstance(got, Tensor) != isinstance(wanted, Tensor)
    if got.shape != wanted.shape:
        return True
    if not wanted.is_floating_point() or not wanted.numel():
        return not torch.equal(got, wanted)
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(got), finite):
        return True
    apart = error_ratio.relative(got[finite], wanted[finite].double())
    return not apart <= tolerance_of(wanted.dtype)


class Recording(fx.Interpreter):
    """Runs a graph, and keeps the value of every node."""

    def __init__(self, module: fx.GraphModule, *, copies: bool) -> None:
        super().__init__(module)
        self.copies = copies
        self.values: Values = {}

    def run_node(self, n: fx.Node) -> Any:
        """A copy is kept where a later node may write into the value."""
        value = settled(super().run_node(n))
        is_kept_whole = type(value) is Tensor and self.copies
        self.values[n.name] = value.detach().clone() if is_kept_whole else value
        return value


@dataclass
class WrongGraph:
    """A graph whose code is wrong on this rank."""

    graph: Graph
    values: Values
    """What each node is in eager."""
    number: int
    """Number of its run, among those of the call."""
    of_dynamo: bool = False
    in_backward: bool = False
    """Its outputs are right, the gradients of its inputs are not."""


@dataclass
class Comparison:
    """Runs of graphs so far."""

    of_dynamo: bool = False
    """Graphs of Dynamo write in place, and have gradients; those behind AOTAutograd are functional."""
    wrong: list[WrongGraph] = field(default_factory=list)
    """The first ones; noise around zero is told from an error later, in parts of them."""
    graphs: list[Graph] = field(default_factory=list)
    """Those that ran, in order."""

    def on_run(self, graph: Graph, inputs: Sequence[Any], compiled: Compiled) -> Sequence[Any]:
        """Run both; the outputs are those of eager."""
        self.graphs.append(graph)
        copies = list(map(copied_input, inputs))
        put_back = put_back_random()
        got = _in_list(compiled(*copies))
        put_back()
        recorded = Recording(graph.module, copies=self.of_dynamo)
        originals = list(map(copied_input, inputs))
        outputs = recorded.run(*inputs)
        wanted = _in_list(outputs)
        pairs = list(zip(got, wanted, strict=True))
        for one, other, before in zip(copies, inputs, originals, strict=True):
            # What was written into an input; Inductor may use one that nobody needs as memory.
            if self.of_dynamo or is_wrong(_plain(before), _plain(other)):
                pairs.append((one, other))
        found = any(is_wrong(_plain(one), _plain(other)) for one, other in pairs)
        in_backward = False
        if self.of_dynamo and not found:
            in_backward = found = self._gradients_differ(graph, originals, copies, got, put_back)
        if found and len(self.wrong) < _MOST:
            names = [node.name for node in graph.module.graph.nodes if node.op == "placeholder"]
            values = recorded.values | dict(zip(names, originals, strict=True))
            self.wrong.append(WrongGraph(graph, values, len(self.graphs), self.of_dynamo, in_backward))
        return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]

    def _gradients_differ(
        self, graph: Graph, originals: Sequence[Any], copies: Sequence[Any], got: Sequence[Any], put_back: PutBack
    ) -> bool:
        """All ranks have the same graph, so all of them run these backward passes."""
        put_back()
        again = list(map(copied_input, originals))
        wanted = _in_list(fx.Interpreter(graph.module).run(*again))
        pairs = zip(gradients(got, copies), gradients(wanted, again), strict=True)
        return any(is_wrong(_plain(one), _plain(other)) for one, other in pairs)


def gradients(outputs: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
    """Gradients of the inputs from gradients of the outputs that are the same in every call."""
    ends = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    starts = [one for one in inputs if isinstance(one, Tensor) and one.requires_grad and one.is_leaf]
    if not ends or not starts:
        return ()
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(end.shape, generator=generator).to(end) for end in ends]
    return torch.autograd.grad(ends, starts, given, allow_unused=True)


def _in_list(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _plain(value: Any) -> Any:
    """The tensor of this rank, detached: of a DTensor its local part."""
    if not isinstance(value, Tensor):
        return value
    local = value.to_local() if hasattr(value, "to_local") else value
    return settled(local).detach()


def short(value: Any) -> str:
    """A few numbers of a tensor."""
    if not isinstance(value, Tensor):
        return str(value)
    numbers = value.detach().flatten()[:4].tolist()
    dots = ", ..." if value.numel() > len(numbers) else ""
    return "[" + ", ".join(f"{number:.4g}" for number in numbers) + dots + "]"


def first_difference(got: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Both from the first number on that differs most, so that what is printed shows the difference."""
    if got.shape != wanted.shape or not got.numel():
        return got, wanted
    one, other = got.detach().flatten(), wanted.detach().flatten()
    apart = (one.double() - other.double()).abs().nan_to_num(nan=float("inf"))
    place = int((apart > apart.max() / 2).nonzero()[0]) if float(apart.max()) else 0
    return one[place:], other[place:]
