"""A program as its ranks and one device build it -> how the ranks may hold its parameters, and their values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import combinations, islice, product

import torch
from torch import Tensor

from tpcompile.typecheck.assembly import WHOLE, Assembly, declared, possible
from tpcompile.typecheck.program import Description, Known, NotComparable, drawn

_MOST = 300
"""Layouts that are tried."""
Choice = Mapping[str, Assembly]
"""Parameter -> its layout."""


@dataclass(frozen=True)
class Layouts:
    """The possible layouts of all parameters, and the numbers that the ranks hold."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of the full parameters."""
    options: Mapping[str, Sequence[Assembly]]
    values: Mapping[str, Tensor]
    """Full parameters in their first layouts."""
    dtensors: frozenset[str]
    """Parameters whose layouts torch knows."""
    summed: frozenset[str]
    """Parameters whose gradients the caller sums over the ranks."""
    size: int

    def parts(self, rank: int) -> dict[str, Tensor]:
        """What the rank holds; of a DTensor all."""
        return {
            name: value if name in self.dtensors else self.options[name][0].part(value, rank)
            for name, value in self.values.items()
        }

    def full(self, choice: Choice) -> dict[str, Tensor]:
        """The full parameters of which the ranks hold parts, in these layouts."""
        found = dict(self.values)
        for name, layout in choice.items():
            first = self.options[name][0]
            if layout is not first:
                parts = [first.part(self.values[name], rank) for rank in range(self.size)]
                found[name] = layout.full(parts, self.shapes[name])
        return found

    def choices(self) -> Iterator[Choice]:
        """The layouts to try, those with the fewest unlikely ones first."""
        return islice(self._choices(), _MOST)

    def _choices(self) -> Iterator[Choice]:
        # Weights and biases of one module, and those of equal modules in all layers, are packed alike.
        modules = {name: re.sub(r"\.?(weight|bias)$", "", name) or name for name in self.options}
        group_of = {name: re.sub(r"\d+", "#", module) for name, module in modules.items()}
        groups: dict[str, list[str]] = {}
        for name, group in group_of.items():
            groups.setdefault(group, []).append(name)
        num_options = {group: max(len(self.options[name]) for name in names) for group, names in groups.items()}
        open_groups = [group for group, number in num_options.items() if number > 1]
        for number in range(len(open_groups) + 1):
            for chosen in combinations(open_groups, number):
                for places in product(*(range(1, num_options[group]) for group in chosen)):
                    by_group = dict(zip(chosen, places, strict=True))
                    yield {
                        name: options[min(by_group.get(group_of[name], 0), len(options) - 1)]
                        for name, options in self.options.items()
                    }


def layouts_of(ranks: Sequence[Description], one: Description, types: Mapping[str, str]) -> Layouts:
    """The layouts that shapes and declarations allow. Raises NotComparable where there is none."""
    # Of several patterns that fit a name the last one counts.
    declared = {name: text for pattern, text in types.items() for name in one.parameters if fnmatch(name, pattern)}
    options: dict[str, Sequence[Assembly]] = {}
    for name, known in one.parameters.items():
        parts = [each.parameters.get(name) for each in ranks]
        found = _options(name, known, [part for part in parts if part is not None], ranks[0], len(ranks))
        if None in parts or not found:
            raise NotComparable(f"parameter {name} is not a part of the one that one device has")
        if found[0].is_whole and declared.get(name, "").startswith(("V", "P")):
            raise NotComparable(f"parameter {name} has one shape on a rank and on one device")
        options[name] = found
    more = sorted(set(ranks[0].parameters) - set(one.parameters))
    if more:
        raise NotComparable(f"one device has no parameter {more[0]}")
    shapes = {name: known.full or known.shape for name, known in one.parameters.items()}
    values = {
        name: drawn(known, shapes[name], seed=number) for number, (name, known) in enumerate(one.parameters.items())
    }
    dtensors = frozenset(name for name, known in ranks[0].parameters.items() if known.full)
    summed = frozenset(name for name in one.parameters if declared.get(name) == "R")
    return Layouts(shapes, options, values, dtensors, summed, len(ranks))


def _options(name: str, known: Known, parts: Sequence[Known], rank: Description, size: int) -> Sequence[Assembly]:
    full = known.full or known.shape
    if parts and parts[0].full is not None:
        return [WHOLE] if parts[0].full == full else []
    spec = rank.declared.get(name)
    if spec is None:
        return possible(full, [part.shape for part in parts])
    layout = declared(spec, full, size)
    wanted = [layout.part(torch.empty(full), number).shape for number in range(size)]
    return [layout] if wanted == [part.shape for part in parts] else []
