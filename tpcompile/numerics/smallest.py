"""A graph whose compiled code is wrong, and the value of each node in eager -> the fewest nodes that still are wrong.

A part of the graph is given, as inputs, what the other nodes are in eager; so no part has a collective, and a rank
searches alone. First all values are outputs, which names the node in one compile; where the fault is gone then, since
outputs are not fused away, nodes are left out by halves as long as the rest is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from tpcompile.numerics import error_ratio
from tpcompile.numerics.beside_eager import WrongGraph, gradients, is_wrong
from tpcompile.numerics.drawn import Drawn
from tpcompile.torch_api.comparing import copied_input, put_back_random, with_settings

_OPS = ("call_function", "call_method")
_WITHOUT_VALUE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
"""Names of ops whose numbers mean nothing."""
_LIMIT = 10.0
"""Times the error of eager; two orders of the same sums are apart by about one."""
_ALONE = 8
"""So many producers of a wrong node are tried, and twice as many while that is right."""


@dataclass(frozen=True)
class Difference:
    """A value of a part that is wrong where it is compiled."""

    node: str
    got: Any
    wanted: Any
    in_backward: bool = False


@dataclass(frozen=True)
class Part:
    """Some nodes of a graph, and what they are given."""

    module: fx.GraphModule
    inputs: tuple[Tensor, ...]
    nodes: tuple[fx.Node, ...]
    """Those of the whole graph."""
    differences: tuple[Difference, ...] = ()
    """What is wrong of it when it is compiled."""


class Search:
    """Parts of one graph, compiled until the time is over."""

    def __init__(self, wrong: WrongGraph, *, timeout_s: float) -> None:
        self._wrong = wrong
        self._until = time.monotonic() + timeout_s
        self.num_compiles = 0

    @property
    def is_over(self) -> bool:
        """The time is over."""
        return time.monotonic() > self._until

    def smallest(self) -> Part | None:
        """None where no part without collectives is wrong."""
        nodes = [node for node in self._wrong.graph.module.graph.nodes if self._can_be_compiled(node)]
        found = self._named_at_once(nodes) or self._compiled(nodes, self._ends(nodes))
        return None if found is None else self._shrunk(found)

    def _named_at_once(self, nodes: Sequence[fx.Node]) -> Part | None:
        """The first wrong node with as many of those behind it as it takes."""
        if self._wrong.in_backward:
            return None
        whole = self._compiled(nodes, nodes)
        if whole is None:
            return None
        first = next(node for node in nodes if node.name == whole.differences[0].node)
        behind = [*_producers(first, nodes), first]
        size = 1
        while size < len(behind) and not self.is_over:
            found = self._compiled(behind[-size:], [first])
            if found is not None:
                return found
            size = max(_ALONE, 2 * size)
        return self._compiled(behind, [first]) or whole

    def _shrunk(self, part: Part) -> Part:
        """Leave out nodes by halves, quarters, ... as long as what is left is wrong."""
        length = len(part.nodes) // 2
        while length and not self.is_over:
            for start in range(0, len(part.nodes), length):
                left = [*part.nodes[:start], *part.nodes[start + length :]]
                smaller = self._compiled(left, self._ends(left)) if left else None
                if smaller is not None:
                    part = smaller
                    break
            else:
                length //= 2
            length = min(length, len(part.nodes) // 2)
        return part

    def _ends(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Those that something outside uses. What nothing uses writes into what it is given, and is no output: a pass
        that takes out what is not used would keep it."""
        inside = set(nodes)
        return [node for node in nodes if not inside.issuperset(node.users)]

    def _can_be_compiled(self, node: fx.Node) -> bool:
        """False for a collective, also in a graph of its own that the node calls, as an autograd function does."""
        is_collective = "c10d" in str(node.target)
        if node.op not in _OPS or is_collective:
            return False
        values = self._wrong.values
        given = [values.get(one.name) for one in node.all_input_nodes]
        return node.name in values and not any(isinstance(one, nn.Module) for one in given)

    def _compiled(self, nodes: Sequence[fx.Node], ends: Sequence[fx.Node]) -> Part | None:
        """The part of these nodes with what is wrong of it; None where it is right, or cannot be compiled."""
        part = self._cut(nodes, ends)
        if part is None or self.is_over:
            return None
        self.num_compiles += 1
        try:
            with with_settings(self._wrong.graph.settings), torch.set_grad_enabled(self._wrong.in_backward):
                differences = differences_of(part, self._wrong.graph.backend)
        except Exception:  # a part that a backend cannot compile shows nothing
            return None
        return Part(part.module, part.inputs, part.nodes, differences) if differences else None

    def _cut(self, nodes: Sequence[fx.Node], ends: Sequence[fx.Node]) -> Part | None:
        values = self._wrong.values
        # An item of a tuple that is outside is given as such.
        items = {node for node in nodes if getattr(node.target, "__name__", "") == "getitem"}
        inside = [node for node in nodes if node not in items or node.args[0] in nodes]
        given: dict[str, Tensor] = {}
        for node in inside:
            for source in node.all_input_nodes:
                if source not in inside and isinstance(values[source.name], Tensor):
                    given[source.name] = values[source.name]
        graph = fx.Graph()
        copies: dict[str, Any] = {name: graph.placeholder(name) for name in given}
        for node in inside:
            copies[node.name] = graph.node_copy(node, lambda one: copies.get(one.name, values[one.name]))
        outputs = []
        for node in ends:
            name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")
            if node in inside and isinstance(values[node.name], Tensor) and name not in _WITHOUT_VALUE:
                outputs.append(node)
        is_writing = any(not node.users for node in inside)
        if not outputs and not is_writing:
            return None
        graph.output(tuple(copies[node.name] for node in outputs))
        module = fx.GraphModule(self._wrong.graph.module, graph)
        return Part(module, tuple(given.values()), tuple(inside))


def differences_of(part: Part, backend: Any) -> tuple[Difference, ...]:
    """Outputs of a part, and gradients where they are asked for, that differ between its compiled code and eager."""
    drawn = Drawn()
    with drawn.recorded():
        wanted = _run(part, part.module, part.inputs)
    got = _run(part, torch.compile(part.module, backend=backend, dynamic=False), part.inputs)
    found = [one for one, other in zip(got, wanted, strict=True) if is_wrong(one.got, other.got)]
    if not found:
        return ()
    exact = {(one.node, one.number): one.got for one in _in_float64(part, drawn)}
    right = {(one.node, one.number): one.got for one in wanted}
    return tuple(
        Difference(one.node, one.got, right[one.node, one.number], one.in_backward)
        for one in found
        if _is_beyond_rounding(one.got, right[one.node, one.number], exact.get((one.node, one.number)))
    )


class _Value(NamedTuple):
    """One of the tensors that a run makes."""

    node: str
    number: int
    got: Any
    in_backward: bool


def _run(part: Part, program: Any, inputs: Sequence[Tensor]) -> list[_Value]:
    """Outputs, what a node wrote into an input, and gradients of the inputs where gradients are on."""
    names = [one.name for one in next(iter(reversed(part.module.graph.nodes))).all_input_nodes]
    copies = list(map(copied_input, inputs))
    put_back = put_back_random()
    outputs = program(*copies)
    put_back()
    given = [node.name for node in part.module.graph.nodes if node.op == "placeholder"]
    pairs = [*zip(names, outputs, strict=False), *zip(given, copies, strict=True)]
    found = [_Value(name, number, value, False) for number, (name, value) in enumerate(pairs)]
    if torch.is_grad_enabled():
        last = part.nodes[-1].name
        found += [_Value(last, -number, one, True) for number, one in enumerate(gradients(outputs, copies), 1)]
    return found


def _in_float64(part: Part, drawn: Drawn) -> list[_Value]:
    """The same in float64; empty where an op of it needs its dtype."""
    inputs = [copied_input(one).double() if one.is_floating_point() else one for one in part.inputs]
    leaves = [one.detach().requires_grad_(given.requires_grad) for one, given in zip(inputs, part.inputs, strict=True)]
    try:
        with drawn.exactly():
            return _run(part, part.module, leaves)
    except Exception:  # what a part is made of is the user's
        return []


def _is_beyond_rounding(got: Any, wanted: Any, exact: Any) -> bool:
    """False where eager is as far from float64: of a gradient that is zero both are noise."""
    is_known = isinstance(exact, Tensor) and isinstance(got, Tensor) and exact.is_floating_point()
    if not is_known or got.shape != wanted.shape or not torch.isfinite(exact).all():
        return True
    return not error_ratio.distance(got, wanted, wanted, exact)["ratio"] <= _LIMIT


def _producers(node: fx.Node, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """All that the node is made of, in order."""
    behind, left = set(), [node]
    while left:
        for source in left.pop().all_input_nodes:
            if source not in behind:
                behind.add(source)
                left.append(source)
    return [one for one in nodes if one in behind]
