"""One op with the SPMD types of its operands -> what a rule needs to judge it; the table of rules.

A rule is registered for op names without overload and without the `_` of the in-place form, or for a collective
wrapper, and returns the type of the result, or one type per result. A rule that finds a violation returns
`step.flag(...)`: the result is not followed further, so that each fault is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.typecheck.ops import FUNCTIONAL
from tpcompile.typecheck.report import Violation
from tpcompile.typecheck.site import Site
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, ZERO, Maker, Origin, Pending, SpmdType, Types
from tpcompile.typecheck.wording import Wording

Result = SpmdType | Sequence[SpmdType]
Rule = Callable[["Step"], Result]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for these ops."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"{name} has two rules"
            RULES[name] = function
        return function

    return register


@dataclass
class Step:
    """One op being judged."""

    name: str
    """`namespace.op`, or the name of a collective wrapper."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Keyword arguments of an op, the fields of its `Call` for a wrapper."""
    out: Any
    """What the op returned: a tensor, a sequence, or any other value."""
    type_of: Callable[[Tensor], SpmdType]
    site_of: Callable[[], Site]
    group: dist.ProcessGroup
    """The checked group."""
    world: int
    rank: int
    """This rank in it."""
    written: list[Tensor] = field(default_factory=list)
    """Tensors that an in-place op writes to; these get the types then."""
    is_pointwise: bool = False
    differentiable: bool = True
    """Gradients are recorded where the op runs, and its result can have one."""
    is_judged: bool = True
    """A rule knows the op; a rule sets it to False where a fault in the op would not be found."""
    why_not_judged: str = ""
    """What a rule would have to know; empty where no rule knows the op."""
    violations: list[Violation] = field(default_factory=list)

    @property
    def is_wrapper(self) -> bool:
        """A call of one of our collective wrappers."""
        return "." not in self.name

    @property
    def is_collective(self) -> bool:
        """A call of a wrapper, or a collective of torch's own."""
        return self.is_wrapper or self.name in FUNCTIONAL or self.name.startswith("c10d.")

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Argument by position or name."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    def dim_at(self, index: int) -> int:
        """The argument `dim`, counted from the front of the first operand."""
        num_dims: int = self.args[0].dim()
        dim: int = self.arg(index, "dim", 0)
        return dim % max(1, num_dims)

    def type_at(self, index: int, name: str = "") -> SpmdType:
        """Type of one argument."""
        return self.type_in(self.arg(index, name))

    def type_in(self, value: Any) -> SpmdType:
        """Type of an argument; one that is not a tensor is a constant."""
        if isinstance(value, Tensor):
            return self.type_of(value)
        return ZERO if is_zero(value) else CONSTANT

    def number_in(self, value: Any) -> float | None:
        """The number that an argument is: a Python number, or a constant tensor that has one value in all places."""
        if isinstance(value, Tensor):
            is_constant = self.type_of(value).kind == "C"
            is_readable = value.layout is torch.strided and not value.is_meta
            value = _only_value(value) if is_constant and is_readable else None
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def operands(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return tensors_in((self.args, self.kwargs))

    @property
    def types(self) -> Types:
        """Types of the operands."""
        return Types(map(self.type_of, self.operands))

    @property
    def results(self) -> list[Tensor]:
        """The tensors that the op returned."""
        return tensors_in(self.out)

    @property
    def targets(self) -> list[Tensor]:
        """The tensors that get the types of the results."""
        return self.written or self.results

    def typed(self, result: Result) -> list[SpmdType]:
        """One type for each of the targets."""
        if isinstance(result, SpmdType):
            return [result] * max(1, len(self.targets))
        return list(result)

    def first_result(self, type_: SpmdType, *, others: SpmdType = UNKNOWN) -> Result:
        """`type_` for the first result, `others` for those after it."""
        return [type_, *[others] * (len(self.results) - 1)]

    def is_own_group(self, group: Any) -> bool:
        """True when a process group, or the name of one, is the checked one."""
        return is_same_group(group, self.group)

    def has_gradient(self, x: SpmdType) -> bool:
        """True when a gradient flows back through this op into an operand of this type."""
        return self.differentiable and x.grad

    def origin(self, what: str = "", *, maker: Maker = "op") -> Origin:
        """This op as the origin of its result."""
        return Origin(what or self.name, self.site_of(), maker)

    def violation(self, wording: Wording, **facts: Any) -> Violation:
        """A violation by this op, worded with the facts."""
        facts |= {"op": self.name, "world": self.world, "rank": self.rank}
        operands = tuple(map(str, self.types))
        why = wording.why.format(**facts)
        return Violation(wording.rule, self.name, operands, self.site_of(), why, wording.fix.format(**facts))

    def flag(self, found: Violation | Wording, **facts: Any) -> SpmdType:
        """Report a violation by this op; its result is of unknown type, which is never reported."""
        if isinstance(found, Wording):
            found = self.violation(found, **facts)
        self.violations.append(found)
        return UNKNOWN

    def pending(self, kind: str, wording: Wording, **facts: Any) -> Pending:
        """What the result of this op has to be combined with first, and how any other use is worded."""
        return Pending(kind, self.violation(wording, **facts))


def is_same_group(group: Any, own: dist.ProcessGroup) -> bool:
    """True when a process group, boxed or not, or the name of one, is `own`."""
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    name = group if isinstance(group, str) else getattr(group, "group_name", "")
    return bool(name == own.group_name)


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def _only_value(tensor: Tensor) -> Any:
    """The value that all elements have; None for different ones, and for several zeros, as of an empty input."""
    if tensor.numel() == 1:
        return tensor.item()
    values = tensor.flatten()
    first = values[:1]
    is_one_value = bool(first.any()) and torch.equal(values, first.expand_as(values))
    return first.item() if is_one_value else None


def is_zero(value: Any) -> bool:
    """True when a scalar argument is the number zero."""
    return isinstance(value, (int, float)) and value == 0


def is_float(tensor: Tensor) -> bool:
    """True when a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()
