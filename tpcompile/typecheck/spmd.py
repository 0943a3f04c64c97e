"""Type of a local tensor over one TP axis: replicated, varying or partial, and the gradient it expects.

kind  value on the ranks                  gradient on the ranks
I     equal                               equal
R     equal                               partial: the ranks' gradients must be summed
V     different: a shard, or any value    of this rank's own value
P     partial: whole after a reduce       equal
C     a constant made in the forward      none
U     not followed                        not followed; never reported

Without a gradient I and R are the same. The names are those of spmd_types
(https://github.com/meta-pytorch/spmd_types); the sharded dim, the kind of partial and U are ours.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

from tpcompile.errors import ConfigError
from tpcompile.typecheck.report import Violation
from tpcompile.typecheck.scale import Scale, own_scale, total
from tpcompile.typecheck.site import Site

Kind = Literal["I", "R", "V", "P", "C", "U"]
_WRITTEN = re.compile(r"^([IRVPCU])(?:\((-?\w+)\))?$")
Maker = Literal["op", "parameter", "hooked", "all_reduce", "all_gather"]
"""What made a value: an op, the module as a parameter without a declared layout (and with a hook), or a collective."""


@dataclass(frozen=True)
class Origin:
    """The op that made a replicated or partial value."""

    what: str
    """Collective or op, e.g. `all_reduce(dst='I')`; empty where it is not known."""
    site: Site
    maker: Maker = "op"

    @property
    def made(self) -> str:
        """`, made by OP at FILE:LINE` for a message; empty where it is not known."""
        return f", made by {self}" if self.what else ""

    def __str__(self) -> str:
        return f"{self.what} at {self.site.file}:{self.site.line}" if self.site.line else self.what


NOT_KNOWN = Origin("", Site())


@dataclass(frozen=True)
class Pending:
    """A value that is right only together with one of a different rank, and the violation of any other use."""

    kind: str
    """What may be done with it: a name of the tables in pending.py."""
    violation: Violation
    """What is reported of any other use, at the op that made the value."""
    dim: int | None = None
    """The dim that it was made along."""
    op: str = ""
    """The reduction over the blocks that makes gathered statistics one statistic; empty for other values."""

    def misused(self, how: str) -> Violation:
        """The violation of a use as if it were a value of the whole tensor; `how` says by what."""
        return replace(self.violation, why=f"{self.violation.why}; {how}")


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
    """V: size of what was merged into the dim after the shard, as E in a flattened [h, E]; only read by a later
    split."""
    op: str = "sum"
    """P: the reduction that makes the value whole: sum, mean, max, min, product, norm, norm1 (of order 1), var or
    logsumexp; `absolute` is the absolute value of a partial sum."""
    replicated_rows: tuple[int, int] | None = None
    """V: rows of the sharded dim, from and to, that neighbouring ranks hold as well: each has a part of their gradient.
    They have to enter a region of these ranks by copy_to_tp."""
    is_masked: bool = False
    """V: multiplied by, or chosen with, what differs per rank, so that the ranks' values may be added up."""
    is_lookup: bool = False
    """V: the rows of a table, or the elements, that a rank found by numbers of which most are another rank's: wrong
    there until a mask or a product clears them."""
    pending: Pending | None = field(default=None, compare=False)
    """What has to be done to the value before it is one of the whole tensor; see pending.py."""
    is_zero: bool = False
    """C: all elements are zero, so it may be added to any type."""
    positions: SpmdType | None = field(default=None, compare=False)
    """C, I and R: it counts from 0 on every rank, and this is its type as a shard; see positions.py."""
    undeclared: str = field(default="", compare=False)
    """I and R: a parameter without a declared layout that it is made of. It is whole only if that one is."""
    scale: Scale | None = field(default=None, compare=False)
    """I, R, V and P: multiples of which tensors it is the sum of; None where it is a tensor of its own."""
    origin: Origin = field(default_factory=lambda: NOT_KNOWN, compare=False)

    def __str__(self) -> str:
        if self.is_known_shard:
            return f"V({self.dim})"
        if self.kind == "P" and self.op != "sum":
            return f"P({self.op})"
        return self.kind

    @property
    def is_known_shard(self) -> bool:
        """A V whose sharded dim is known."""
        return self.kind == "V" and self.dim is not None

    @property
    def is_whole(self) -> bool:
        """Equal on all ranks."""
        return self.kind in ("I", "R", "C")

    @property
    def is_reduced(self) -> bool:
        """The result of an all-reduce or all-gather."""
        return self.origin.maker in ("all_reduce", "all_gather")

    @property
    def multiples(self) -> Scale:
        """The `scale`; that of a tensor of its own where there is none."""
        return own_scale() if self.scale is None else self.scale

    def is_partial_of(self, *ops: str) -> bool:
        """Partial, and made whole by one of these reductions."""
        return self.kind == "P" and self.op in ops

    def with_dim(self, dim: int | None, left: int = 1, right: int = 1) -> SpmdType:
        """The same V, sharded on `dim`."""
        return replace(self, dim=dim, left=left, right=right)

    def keep_dim_if(self, is_known: bool) -> SpmdType:
        """The same type, without the sharded dim unless `is_known`."""
        return self if is_known else self.with_dim(None)


class Types(tuple[SpmdType, ...]):
    """Types of the operands of one op, in order."""

    __slots__ = ()

    def of_kind(self, *kinds: Kind) -> Types:
        """The types of these kinds."""
        return Types(t for t in self if t.kind in kinds)

    def without(self, kind: Kind) -> Types:
        """The types of all other kinds."""
        return Types(t for t in self if t.kind != kind)

    def has(self, *kinds: Kind) -> bool:
        """True when one is of these kinds."""
        return any(t.kind in kinds for t in self)

    @property
    def without_pending(self) -> Types:
        """The types of values that are right as they are."""
        return Types(t for t in self if t.pending is None)

    @property
    def kinds(self) -> Set[Kind]:
        """The kinds that occur."""
        return {t.kind for t in self}

    @property
    def dims(self) -> Set[int | None]:
        """The sharded dims that occur, with None for a type without one."""
        return {t.dim for t in self}

    @property
    def ops(self) -> Set[str]:
        """The reductions that occur."""
        return {t.op for t in self}

    @property
    def grad(self) -> bool:
        """True when a gradient flows back through one of them."""
        return any(t.grad for t in self)

    @property
    def with_gradient(self) -> Types:
        """The types that a gradient flows back through."""
        return Types(t for t in self if t.grad)

    @property
    def deciding(self) -> Types:
        """The types that decide the gradient of the result: those with a gradient, or all when there is none."""
        return self.with_gradient or self

    @property
    def origin(self) -> Origin:
        """The origin that all of them share."""
        origins = {t.origin for t in self}
        if len(origins) > 1:
            return NOT_KNOWN
        return origins.pop()

    @property
    def shard(self) -> SpmdType:
        """The type of several V together: the first, without its dim unless all are sharded alike."""
        layouts = {(t.dim, t.left) for t in self}
        first = replace(self[0], is_masked=any(t.is_masked for t in self))
        return first.keep_dim_if(len(layouts) == 1)


CONSTANT, ZERO, UNKNOWN = SpmdType("C"), SpmdType("C", is_zero=True), SpmdType("U")


def varying(dim: int | None = None, *, grad: bool = False) -> SpmdType:
    """V, sharded on `dim` when that is known."""
    return SpmdType("V", grad, dim)


def parse_type(text: str, *, ndim: int, grad: bool) -> SpmdType:
    """`I`, `R`, `V`, `V(-1)`, `P`, `P(max)`, `C` or `U` -> a type of a tensor with `ndim` dims.

    `grad` says whether it requires a gradient. Raises ConfigError for any other text.
    """
    match = _WRITTEN.match(text)
    if match is None:
        raise ConfigError(f"SPMD type {text!r} is unknown; write one of {', '.join(get_args(Kind))}, V(dim), P(op)")
    kind, detail = cast(Kind, match[1]), match[2]
    if kind in ("C", "U"):
        return SpmdType(kind)
    if kind == "P":
        return SpmdType("P", grad, op=detail or "sum")
    if kind != "V" or detail is None:
        return SpmdType(kind, grad)
    is_number = re.fullmatch(r"-?\d+", detail) is not None
    if not is_number or not -ndim <= int(detail) < ndim:
        raise ConfigError(f"SPMD type {text!r}: write a dim from {-ndim} to {ndim - 1}")
    return varying(int(detail) % ndim, grad=grad)


def of_base(old: SpmdType, part: SpmdType) -> SpmdType:
    """Type of a tensor after a part of it was written through a view."""
    part = part.with_dim(None)
    kinds = old.kind + part.kind
    if old.kind == "C":
        return part
    if old == part:
        return replace(part, scale=total([old.multiples.anew(), part.multiples.anew()]))
    if kinds in ("VV", "VC"):
        grad = Types([old, part]).grad
        return replace(old, grad=grad, is_lookup=False).with_dim(None)
    if part.kind == "C":
        return old
    return UNKNOWN
