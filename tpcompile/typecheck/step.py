"""One op with the contract types of its operands -> what a rule needs to judge it; the table of rules.

A rule is registered for op names without overload and without the `_` of the in-place form, and returns the type of the
result, or one type per result. A rule that finds a violation returns `step.flag(...)`: the result is not followed
further, so that one fault is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpcompile.typecheck.report import Violation
from tpcompile.typecheck.site import Site
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, Origin, SpmdType

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
    """What the op returned: a tensor, a sequence, or something else."""
    type_of: Callable[[Tensor], SpmdType]
    site_of: Callable[[], Site]
    world: int
    """Size of the checked group."""
    is_pointwise: bool = False
    differentiable: bool = True
    """Gradients are wanted where the op runs and its result can carry one."""
    is_own_group: Callable[[Any], bool] = lambda group: True
    """Whether a process group, or its name, is the checked one."""
    violations: list[Violation] = field(default_factory=list)

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Argument by place or name."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    def type_at(self, index: int, name: str = "") -> SpmdType:
        """Type of one argument; anything that is no tensor is a constant."""
        value = self.arg(index, name)
        return self.type_of(value) if isinstance(value, Tensor) else CONSTANT

    def operands(self) -> list[tuple[Tensor, SpmdType]]:
        """All tensors among the arguments, in order."""
        return [(tensor, self.type_of(tensor)) for tensor in tensors_in((self.args, self.kwargs))]

    def origin(self, what: str = "") -> Origin:
        """This op as the origin of its result."""
        return Origin(what or self.name, self.site_of())

    def flag(self, name: str, *, why: str, fix: str) -> SpmdType:
        """Report a violation by this op; the result is the type that is never reported again."""
        types = tuple(str(type_) for _, type_ in self.operands())
        self.violations.append(Violation(name, self.name, types, self.site_of(), why, fix))
        return UNKNOWN


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []
