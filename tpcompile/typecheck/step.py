"""One op with the SPMD types of its operands -> what a rule needs to judge it; the table of rules.

A rule is registered for op names without overload and without the `_` of the in-place form, and returns the type of the
result, or one type per result. A rule that finds a violation returns `step.flag(...)`: the result is not followed
further, so that each fault is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpcompile.typecheck.report import OnSomeRanks, Violation
from tpcompile.typecheck.site import Site
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, ZERO, Maker, Origin, Pending, SpmdType, Types

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
    out: Any
    """What the op returned: a tensor, a sequence, or any other value."""
    type_of: Callable[[Tensor], SpmdType]
    site_of: Callable[[], Site]
    world: int
    """Size of the checked group."""
    rank: int = 0
    """This rank in it."""
    is_pointwise: bool = False
    differentiable: bool = True
    """Gradients are recorded where the op runs, and its result can have one."""
    is_own_group: Callable[[Any], bool] = lambda group: True
    """True when a process group, or the name of one, is the checked one."""
    is_across: Callable[[Any], bool] = lambda group: False
    """True when a process group shares this rank alone with the checked one."""
    is_judged: bool = True
    """A rule knows the op; a rule sets it to False where a fault in the op would not be found."""
    violations: list[Violation] = field(default_factory=list)

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Argument by position or name."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

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

    def operands(self) -> list[tuple[Tensor, SpmdType]]:
        """All tensors among the arguments, in order, with their types."""
        return [(tensor, self.type_of(tensor)) for tensor in tensors_in((self.args, self.kwargs))]

    @property
    def types(self) -> Types:
        """Types of all tensors among the arguments, in order."""
        return Types(type_ for _, type_ in self.operands())

    @property
    def results(self) -> list[Tensor]:
        """The tensors that the op returned."""
        return tensors_in(self.out)

    def all_results(self, type_: SpmdType) -> Result:
        """The same type for every result."""
        return [type_] * max(1, len(self.results))

    def first_result(self, type_: SpmdType, *, others: SpmdType = UNKNOWN) -> Result:
        """`type_` for the first result, `others` for those after it."""
        return [type_, *[others] * (len(self.results) - 1)]

    def has_gradient(self, x: SpmdType) -> bool:
        """True when a gradient flows back through this op into an operand of this type."""
        return self.differentiable and x.grad

    def origin(self, what: str = "", *, maker: Maker = "op") -> Origin:
        """This op as the origin of its result."""
        return Origin(what or self.name, self.site_of(), maker)

    def flag(self, name: str, *, why: str, fix: str, on_some_ranks: OnSomeRanks | None = None) -> SpmdType:
        """Report a violation by this op; its result is of unknown type, which is never reported."""
        site = self.site_of()
        violation = Violation(name, self.name, self.operand_texts, site, why, fix, on_some_ranks=on_some_ranks)
        self.violations.append(violation)
        return UNKNOWN

    def flag_pending(self, pending: Pending) -> SpmdType:
        """Report that this op uses a pending value as if it were one of the whole tensor, where that was made."""
        self.violations.append(misused(pending, f"{self.name} uses it"))
        return UNKNOWN

    def pending(self, kind: str, rule: str, *, why: str, fix: str, dim: int | None = None, op: str = "") -> Pending:
        """What the result of this op has to be combined with first."""
        return Pending(kind, rule, why, fix, self.origin(), self.operand_texts, dim, op)

    @property
    def operand_texts(self) -> tuple[str, ...]:
        """The types of the operands as a report has them."""
        return tuple(str(type_) for type_ in self.types)


def misused(pending: Pending, how: str) -> Violation:
    """The violation of an op whose result is used as if it were one of the whole tensor; `how` says by what."""
    origin = pending.origin
    why = f"{pending.why}; {how}"
    return Violation(pending.rule, origin.what, pending.operands, origin.site, why, pending.fix)


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if not isinstance(value, (list, tuple)):
        return []
    found: list[Tensor] = []
    for item in value:
        found += tensors_in(item)
    return found


def _only_value(tensor: Tensor) -> Any:
    """The value that all elements have; None for different ones, and for several zeros, as of an empty input."""
    if tensor.numel() == 1:
        return tensor.item()
    values = tensor.flatten()
    first = values[:1]
    filled = first.expand_as(values)
    if not first.any():
        return None
    if torch.equal(values, filled):
        return first.item()
    return None


def is_zero(value: Any) -> bool:
    """True when a scalar argument is the number zero."""
    return isinstance(value, (int, float)) and value == 0


def is_float(tensor: Tensor) -> bool:
    """True when a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def makes_unknown(types: Result) -> bool:
    """True when the first result is not followed; later ones are statistics, as of an attention."""
    results = [types] if isinstance(types, SpmdType) else types
    return len(results) > 0 and results[0].kind == "U"
