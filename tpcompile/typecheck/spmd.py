"""What a local tensor is on one TP axis: replicated, varying or partial, and which gradient it expects.

kind  value on the ranks                  gradient on the ranks
I     equal                               equal
R     equal                               partial: the ranks' gradients must be summed
V     a shard, or anything that differs   of this rank's own value
P     partial: whole after a reduce       equal
C     a constant made in the forward      none
U     not followed                        not followed; never reported

Without a gradient I and R are the same thing. The names are those of spmd_types
(https://github.com/meta-pytorch/spmd_types); the sharded dim, the kind of partial and U are ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from tpcompile.typecheck.site import Site
from tpcompile.errors import ConfigError

Kind = Literal["I", "R", "V", "P", "C", "U"]
_WRITTEN = re.compile(r"^([IRVPCU])(?:\((-?\w+)\))?$")


@dataclass(frozen=True)
class Origin:
    """Where a replicated or partial value came from."""

    what: str
    """Collective or op, e.g. `all_reduce(dst='I')`."""
    site: Site


@dataclass(frozen=True)
class SpmdType:
    """Type of one local tensor over one group."""

    kind: Kind
    grad: bool = False
    """A gradient flows back through it."""
    dim: int | None = None
    """V: the sharded dim, None where it is not known."""
    left: int = 1
    """V: size of what was merged into the dim before the shard, as B in a flattened [B, s]."""
    right: int = 1
    """V: size of what was merged into the dim after the shard, as E in a flattened [h, E]; a hint for a later split,
    the shard is the same with or without it."""
    op: str = "sum"
    """P: what the ranks' values still have to go through: sum, mean, max, min, product, norm, var, logsumexp;
    absolute is of a sum."""
    is_zero: bool = False
    """C: zeros, which may be added to anything."""
    origin: Origin | None = field(default=None, compare=False)

    def __str__(self) -> str:
        if self.kind == "V" and self.dim is not None:
            return f"V({self.dim})"
        return f"P({self.op})" if self.kind == "P" and self.op != "sum" else self.kind

    @property
    def is_known_shard(self) -> bool:
        """A V whose sharded dim is known."""
        return self.kind == "V" and self.dim is not None

    @property
    def is_whole(self) -> bool:
        """Equal on all ranks."""
        return self.kind in ("I", "R", "C")

    @property
    def wants_equal_gradient(self) -> bool:
        """I with a gradient: work that differs per rank must not read it."""
        return self.kind == "I" and self.grad

    @property
    def wants_summed_gradient(self) -> bool:
        """R with a gradient: work that all ranks repeat must not read it."""
        return self.kind == "R" and self.grad

    def with_dim(self, dim: int | None, left: int = 1, right: int = 1) -> SpmdType:
        """The same V, sharded on another dim."""
        return replace(self, dim=dim, left=left, right=right)


CONSTANT, UNKNOWN = SpmdType("C"), SpmdType("U")


def varying(dim: int | None = None, *, grad: bool = False) -> SpmdType:
    """V, sharded on `dim` when that is known."""
    return SpmdType("V", grad, dim)


def parse_type(text: str, *, ndim: int, grad: bool) -> SpmdType:
    """`I`, `R`, `V`, `V(-1)`, `P`, `P(max)`, `C` or `U` -> a type; raises ConfigError for anything else."""
    match = _WRITTEN.match(text)
    if match is None:
        raise ConfigError(f"contract type {text!r} is unknown; write one of {', '.join(get_args(Kind))}, V(dim), P(op)")
    letter, detail = match[1], match[2]
    if letter == "V":
        return varying(_checked_dim(text, detail, ndim), grad=grad)
    if letter == "P":
        return SpmdType("P", grad, op=detail or "sum")
    return {
        "I": SpmdType("I", grad), "R": SpmdType("R", grad), "C": CONSTANT, "U": UNKNOWN,
    }[letter]  # fmt: skip


def _checked_dim(text: str, detail: str | None, ndim: int) -> int | None:
    if detail is None:
        return None
    if not re.fullmatch(r"-?\d+", detail) or not -ndim <= int(detail) < ndim:
        raise ConfigError(f"contract type {text!r}: write a dim from {-ndim} to {ndim - 1}")
    return int(detail) % ndim
