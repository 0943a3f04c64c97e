"""Random ops of a program -> constants, so that its runs can be compared; and with which seed each was drawn.

A mask of dropout keeps all, a uniform number is a half. What would differ between ranks is seen from the seeds: they
are the generator's where the op runs, which the program may have seeded by rank. Not in program.py: the lines of the
user are those up to the first frame of that file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
