"""What the sets of programs with wrong numbers share: parameters with layouts, one fault that can be left out."""

# B batch, S sequence, D model width, F hidden width, H heads, E head size, V vocabulary; lower case is this rank's part
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.layout import Layout, Part, ShardSpec

BATCH, TOKENS, WIDTH, HIDDEN, HEAD, VOCABULARY = 2, 8, 16, 32, 4, 40
Forward = Callable[..., Any]
Shape = tuple[int, ...]
UP, DOWN = ((HIDDEN, WIDTH), 0), ((WIDTH, HIDDEN), 1)
SQUARE, SCALE = ((WIDTH, WIDTH), None), ((WIDTH,), None)
OUT = ((WIDTH, WIDTH), 1)
QKV = ((3 * WIDTH, WIDTH), ShardSpec(dim=0, parts=(Part(WIDTH, unit=HEAD),) * 3))
TABLE = ((VOCABULARY, WIDTH), 0)
MLP: Mapping[str, tuple[Shape, Any]] = {"up": UP, "down": DOWN}


@dataclass(frozen=True)
class Case:
    """A forward of (module, input), right or wrong as `module.is_wrong` says, and what is to be named where it is."""

    forward: Forward
    layouts: Mapping[str, tuple[Shape, Any]]
    kind: str
    """Of the mistake."""
    takes: str = "x"
    """`x` [B, S, D], `ids` [B, S] of the vocabulary."""
    sharded: Mapping[str, Layout] = field(default_factory=dict)
    """As of `check_numerics`."""
    mark: str = "fault"
    """The comment on the line to blame: in the forward, or for any other mark anywhere in its file."""

    @property
    def name(self) -> str:
        return self.forward.__name__

    def build(self, comm: TpComm, *, is_wrong: bool) -> Program:
        """This rank's module; one device has no fault."""
        return Program(self, comm, is_wrong=is_wrong and comm.size > 1)

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor]:
        """Equal on all ranks."""
        if self.takes == "ids":
            return (torch.randint(0, VOCABULARY, (BATCH, TOKENS)),)
        return (torch.randn(BATCH, TOKENS, WIDTH).to(dtype),)


class Program(nn.Module):
    """Parameters by name, each this rank's part of its full shape, and a forward over them."""

    def __init__(self, case: Case, comm: TpComm, *, is_wrong: bool) -> None:
        super().__init__()
        self.comm, self.program, self.is_wrong, self.case = comm, case.forward, is_wrong, case
        for name, (shape, _) in case.layouts.items():
            part = self._spec(name).take(torch.empty(shape), rank=comm.rank, size=comm.size)
            self.register_parameter(name, nn.Parameter(part.contiguous()))

    def _spec(self, name: str) -> ShardSpec:
        shape, layout = self.case.layouts[name]
        if isinstance(layout, int):
            return ShardSpec(dim=layout, parts=(Part(shape[layout]),))
        return layout or ShardSpec()

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {name: self._spec(name) for name in self.case.layouts}

    def forward(self, x: Tensor) -> Any:
        return self.program(self, x)


def heads(x: Tensor) -> Tensor:
    """[B, S, h * E] -> [B, h, S, E]."""
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """[B, h, S, E] -> [B, S, h * E]."""
    return x.transpose(1, 2).flatten(2)


def is_own(m: Any, ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Numbers within this rank's rows of a table of `size` each, and which ids these rows have."""
    local = ids - m.comm.rank * size
    found = (local >= 0) & (local < size)
    return local.clamp(0, size - 1), found
