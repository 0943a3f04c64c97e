"""Parameters that tensors are computed from, and ops without a gradient -> parameters whose gradient is cut.

A reduce under `no_grad`, or of a detached tensor, is right for a statistic. It is a fault where a parameter reaches the
outputs through it alone: its value is used, and it never gets a gradient. So it is with any op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tpcompile.evidence.iterables import grouped
from tpcompile.typecheck.report import Violation
from tpcompile.typecheck.site import in_user_function
from tpcompile.typecheck.spmd import Origin
from tpcompile.typecheck.step import Step, is_float

_FIXES = {
    "collective": "reduce with a stated gradient: all_reduce(x, group=..., dst='I') outside of no_grad",
    "op": "call it outside of no_grad and without detach; freeze a parameter that is not to be trained: "
    "requires_grad_(False)",
}


@dataclass(frozen=True)
class _Cut:
    """An op that no gradient goes through."""

    origin: Origin
    operand: str
    sources: frozenset[str]
    """Parameters that its operand is computed from."""
    place: int
    """Number of violations before it."""
    what: str = "collective"


class Sources:
    """For each tensor, the names of the parameters that its value depends on."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._known: Any = WeakTensorKeyDictionary()
        self._indices: Any = WeakTensorKeyDictionary()
        """Tensors that are made of integers alone."""
        self._names: dict[int, str] = {}
        self._cuts: list[_Cut] = []
        """Collectives."""
        self._lost: dict[str, _Cut] = {}
        """Parameter -> the first op in which its gradient is lost."""
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                self._known[parameter] = frozenset((name,))
                self._names[id(parameter)] = name

    def of(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        """Parameters that any of these tensors depends on."""
        found = [self._known.get(tensor) for tensor in tensors]
        return frozenset().union(*(names for names in found if names))

    def add(self, step: Step, tensors: Iterable[Tensor], operands: Iterable[Tensor]) -> None:
        """Results depend on what their operands depend on; what was written in place on what it was before, too.

        Not through integers, such as the place of the largest value: no gradient could go there. Of values packed with
        such an index it is not known which of the two is read.
        """
        operands = list(operands)
        floats = list(filter(is_float, operands))
        indices = [tensor for tensor in floats if tensor in self._indices]
        names = self.of(floats)
        if indices and step.name in ("aten.cat", "aten.stack"):
            names = frozenset()
        if operands and len(indices) == len(floats):
            for tensor in tensors:
                self._indices[tensor] = True
        for tensor in tensors:
            known = names | self.of((tensor,))
            if known:
                self._known[tensor] = known

    def note_collective(self, x: Tensor, origin: Origin, operand: str, *, place: int) -> None:
        """Remember a collective without a gradient; an autograd.Function around it may have one of its own."""
        has_gradient = x.requires_grad and torch.is_grad_enabled()
        sources = self.of((x,))
        if sources and not has_gradient and not in_user_function():
            self._cuts.append(_Cut(origin, operand, sources, place))

    def note_op(self, step: Step, operands: Iterable[Tensor], *, is_recorded: bool, place: int) -> None:
        """Remember an op that loses the gradient of its operands: unless it `is_recorded`, or detaches them."""
        if is_recorded and step.name != "aten.detach":
            return
        known = self.of(operand for operand in operands if operand.requires_grad)
        names = known.difference(self._lost)
        if names and not in_user_function():
            cut = _Cut(step.origin(), str(step.type_at(0)), names, place, "op")
            self._lost |= dict.fromkeys(names, cut)

    def violations(self, outputs: Iterable[Tensor]) -> list[tuple[int, Violation]]:
        """A violation, and its place in the program, for each collective that cuts the gradient of a parameter."""
        floats = [output for output in outputs if output.is_floating_point()]
        left = self.of(floats) - self._reached(floats)
        found = []
        for cut in self._cuts:
            names = sorted(left & cut.sources)
            left -= cut.sources
            if names:
                found.append((cut.place, _violation(cut, names)))
        lost = grouped(sorted(left & self._lost.keys()), lambda name: self._lost[name].origin.site)
        for names in lost.values():
            cut = self._lost[names[0]]
            found.append((cut.place, _violation(cut, names)))
        return sorted(found, key=itemgetter(0))

    def _reached(self, outputs: Iterable[Tensor]) -> frozenset[str]:
        """Parameters that a backward pass from the outputs gets to."""
        leaves = [getattr(node, "variable", None) for node in nodes_behind(outputs)]
        return frozenset(self._names.get(id(tensor), "") for tensor in [*outputs, *leaves])


def nodes_behind(outputs: Iterable[Tensor]) -> set[Any]:
    """The nodes of the autograd graph that a backward pass from the outputs gets to."""
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        waiting += following
    return seen


def _violation(cut: _Cut, names: list[str]) -> Violation:
    return Violation(
        "gradient-cut",
        cut.origin.what,
        (cut.operand,),
        cut.origin.site,
        why=f"no gradient goes through this {cut.what} (no_grad, or a detached operand), and {', '.join(names)} "
        "reaches the outputs through it alone: it never gets a gradient",
        fix=f"{_FIXES[cut.what]}; for inference check with train=False",
    )
