"""What the sets of modules share: a case, layouts of weights, heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.typecheck.programs import WIDTH, Layout
from tpcompile.layout import Part, ShardSpec

HEAD = 4
QKV = ((24, WIDTH), 0)
SQUARE = ((WIDTH, WIDTH), None)
SHARED_KV = ((2 * HEAD, WIDTH), ShardSpec(dim=0, parts=(Part(2 * 2 * HEAD, unit=2 * HEAD, replicas=2),)))
"""Keys and values of 2 kv heads over 4 ranks: two neighbours hold the same head."""

WIDE = {"wide": ((3 * WIDTH, WIDTH), None)}


@dataclass(frozen=True)
class Case:
    """A module, and how it is called: x [2, 8, 16], or what the input type says of it."""

    forward: Callable[..., Any]
    layouts: dict[str, Layout]
    input_type: str = "I"
    output_type: str | None = "I"
    twin: Callable[..., Any] | None = None
    """The same module without the fault."""


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)
