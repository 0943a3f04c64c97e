"""What the ops of one run returned, in order: records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from tpcompile.evidence.records import UserLine
from tpcompile.numerics.fingerprints import Fingerprint, Part, Shape

Change = Callable[[int, Tensor], Tensor]
"""Number of an op among those that all runs of a program have, and its first result -> what it returns in its stead.

Of a forward pass, and of ops that write into nothing. The place of an op is not equal in every run: autograd copies now
and then.
"""


@dataclass(frozen=True)
class Value:
    """The result of one op, or a tensor that the run was given."""

    name: str
    """The op, or the parameter or buffer; `an input` for others."""
    shape: Shape
    tensor: Fingerprint | None
    """None for the result of a collective that was not there yet."""
    parts: tuple[Part, ...]
    """A rank's equal parts of it, along each dim."""
    line: UserLine | None
    """Line of the op, in a backward pass that of its forward op; for a tensor that was given, of its first use."""
    sources: tuple[int, ...] = ()
    """Places of what the op was given."""
    moments: Fingerprint = ()
    """Norm, sum and maximum, which do not depend on the order; the value alone of a tensor with one element."""
    unit: float = 0.0
    """The largest unit in the last place, relative, of the dtypes that it was made in: autocast rounds on the way."""
    is_float: bool = True
    is_given: bool = False
    module: str = ""
    """Name of the innermost module that ran the op."""
    forward: int | None = None
    """Place of the op whose gradient it makes in a backward pass, where that is known."""
    in_backward: bool = False
    is_by_hand: bool = False
    """Of a backward pass: the program's own code runs it, and the line is that one."""
    callers: tuple[UserLine, ...] = ()
    """Lines of the user's that called this one, innermost first."""
    is_late: bool = False
    """Its numbers, those of a collective, were there only when an op waited for them."""
    node: int | None = None
    """Number of its autograd node in a forward pass; an op without a gradient has that of the op before."""
    numbers: tuple[float, ...] = ()
    """Python numbers that the op was given."""

    @property
    def shown(self) -> float | None:
        """The norm; the value of a tensor with one element."""
        return self.moments[0] if self.moments else None


@dataclass
class Trace:
    """Values in the order in which they were made."""

    values: list[Value] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    """Name of a module -> the values that it returned last."""
    results: dict[str, int] = field(default_factory=dict)
    """Name of a tensor that the call returned -> its value."""


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh, other than the one whose ranks are compared."""

    size: int
    at: int
    """The place of this rank along it."""
    group: dist.ProcessGroup | None = None
    """The ranks along it."""
