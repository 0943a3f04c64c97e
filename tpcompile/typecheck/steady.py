"""Random ops of a program -> constants, so that its runs can be compared; and which of them ranks draw differently.

A mask of dropout keeps all, a uniform number is a half. What would differ between ranks is seen from the seeds: they
are the generator's where the op runs, which the program may have seeded by rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpcompile.numerics.judged import Judged
from tpcompile.numerics.traced import Value
from tpcompile.torch_api.dispatch import TorchDispatchMode

_MASKS = {"aten::bernoulli", "aten::bernoulli_"}
_NUMBERS = {"aten::rand", "aten::rand_like", "aten::uniform_", "aten::randn", "aten::randn_like", "aten::normal_"}


class Steady(TorchDispatchMode):
    """Replaces what is drawn; `drawn` has it with the seed of the default generator."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name not in _MASKS | _NUMBERS:
            return func(*args, **kwargs)
        seed = torch.initial_seed()
        out = func(*args, **kwargs).fill_(1.0 if name in _MASKS else 0.5)
        self.drawn.append((out, seed))
        return out


def first_different(noise: Sequence[int], values: Sequence[Value], judged: Sequence[Judged]) -> int | None:
    """The first op that applies what ranks draw differently to a value that all hold alike, or hold a summand of.

    `noise` has the places of what is drawn. A part of a rank has a mask of its own.
    """
    found = [_used(place, values, judged) for place in noise]
    return min((place for place in found if place is not None), default=None)


def _used(place: int, values: Sequence[Value], judged: Sequence[Judged]) -> int | None:
    """The first op that gives the drawn numbers to a value that is no part of a rank; None for one that is."""
    drawn = {place}
    for number in range(place + 1, len(values)):
        sources = set(values[number].sources)
        if sources.isdisjoint(drawn):
            continue
        others = sources - drawn
        if not others:
            drawn.add(number)
            continue
        return None if all(judged[other] == Judged.PART for other in others) else number
    return None
