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
from tpcompile.typecheck.site import user_function
from tpcompile.typecheck.spmd import Origin
from tpcompile.typecheck.step import Step, is_float
from tpcompile.typecheck.wording import CUT_BY_COLLECTIVE, CUT_BY_OP, Wording


@dataclass(frozen=True)
class _Cut:
    """An op that no gradient goes through."""

    wording: Wording
    origin: Origin
    operand: str
    sources: frozenset[str]
    """Parameters that its operand is computed from."""
    place: int
    """Number of violations before it."""

    def violation(self, names: Iterable[str]) -> tuple[int, Violation]:
        """The violation, and its place in the program, where these parameters reach the outputs through it alone."""
        why = self.wording.why.format(names=", ".join(names))
        operands = (self.operand,)
        found = Violation(self.wording.rule, self.origin.what, operands, self.origin.site, why, self.wording.fix)
        return self.place, found


class Sources:
    """Names of the parameters that the value of each tensor depends on."""

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

    def note_collective(self, step: Step, x: Tensor, *, place: int) -> None:
        """Remember a collective without a gradient; an autograd.Function around it may have one of its own."""
        has_gradient = x.requires_grad and torch.is_grad_enabled()
        if has_gradient or user_function():
            return
        sources = self.of((x,))
        if sources:
            cut = _Cut(CUT_BY_COLLECTIVE, step.origin(), str(step.type_of(x)), sources, place)
            self._cuts.append(cut)

    def note_op(self, step: Step, operands: Iterable[Tensor], *, is_recorded: bool, place: int) -> None:
        """Remember an op that loses the gradient of its operands: unless it `is_recorded`, or detaches them."""
        if is_recorded and step.name != "aten.detach":
            return
        trained = [operand for operand in operands if operand.requires_grad]
        names = self.of(trained).difference(self._lost)
        if not names or user_function():
            return
        cut = _Cut(CUT_BY_OP, step.origin(), str(step.type_at(0)), names, place)
        self._lost |= dict.fromkeys(names, cut)

    def violations(self, outputs: Iterable[Tensor]) -> list[tuple[int, Violation]]:
        """A violation, and its place in the program, for each op that cuts the gradient of a parameter."""
        floats = [output for output in outputs if output.is_floating_point()]
        leaves = [getattr(node, "variable", None) for node in nodes_behind(floats)]
        reached = {self._names.get(id(tensor), "") for tensor in [*floats, *leaves]}
        left = self.of(floats) - reached
        found = []
        for cut in self._cuts:
            names = sorted(left & cut.sources)
            left -= cut.sources
            if names:
                found.append(cut.violation(names))
        lost = grouped(sorted(left & self._lost.keys()), lambda name: self._lost[name].origin.site)
        found += [self._lost[names[0]].violation(names) for names in lost.values()]
        return sorted(found, key=itemgetter(0))


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
