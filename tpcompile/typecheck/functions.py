"""A hand-written autograd.Function -> the types of its results, from its own forward and backward.

Its forward says what is equal, partial or a shard. A whole result may be I or R: its backward is run with the gradient
that each of them has, and the right one is the one with which every input gets the gradient of its type.

type    gradient
I, P    equal on the ranks
R       partial
V       of the rank's own value
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tpcompile.typecheck import wording
from tpcompile.typecheck.report import Violation
from tpcompile.typecheck.site import GENERATED, Site
from tpcompile.typecheck.spmd import UNKNOWN, Kind, Origin, SpmdType, varying
from tpcompile.typecheck.step import is_float, tensors_in


class Follower(Protocol):
    """What this needs of the mode."""

    def declare(self, tensor: Tensor, type_: SpmdType) -> None: ...
    def type_of(self, tensor: Tensor) -> SpmdType: ...
    def read(self, tensor: Tensor) -> None: ...
    def aside(self, run: Callable[[], Any]) -> tuple[Any, list[Violation], bool]: ...


@dataclass(frozen=True)
class Applied:
    """One call of a Function."""

    name: str
    backward: Callable[..., Any]
    args: tuple[Any, ...]
    types: list[SpmdType]
    """Types of all tensors among `args`, before it ran: it may write to them."""
    results: list[Tensor]
    site: Site
    world: int


def is_hand_written(cls: Any) -> bool:
    """False for the Functions of torch, and those that it makes for a custom op."""
    return not cls.__name__.startswith(GENERATED) and not cls.__module__.startswith("torch.")


def types_of_results(applied: Applied, follower: Follower) -> tuple[list[SpmdType], Violation | None]:
    """The types of the results; and what is wrong where no type of theirs fits the backward."""
    values = [_value(follower.type_of(result), result, applied) for result in applied.results]
    origin = Origin(applied.name, applied.site)
    values = [replace(value, origin=origin) if value.is_whole else value for value in values]
    differentiable = [result for result in applied.results if is_float(result) and result.grad_fn is not None]
    if not differentiable:
        return values, None
    if any(value.kind == "U" for value in values):
        return [UNKNOWN] * len(values), None
    kinds: tuple[Kind, ...] = ("I", "R") if any(value.is_whole for value in values) else ("V",)
    outcomes = []
    for kind in kinds:
        typed = []
        for value in values:
            own_kind = kind if value.is_whole else value.kind
            typed.append(replace(value, grad=True, kind=own_kind, is_zero=False))
        outcomes.append((typed, _fits(applied, follower, typed)))
    fitting = [typed for typed, fits in outcomes if fits]
    if len(fitting) == 1:
        return fitting[0], None
    unknown = [UNKNOWN] * len(values)
    is_wrong = all(fits is False for _, fits in outcomes)
    if not is_wrong:
        return unknown, None
    worded = wording.FUNCTION_GRADIENT
    operands = tuple(map(str, applied.types))
    why = worded.why.format(op=applied.name)
    return unknown, Violation(worded.rule, applied.name, operands, applied.site, why, worded.fix)


def _value(found: SpmdType, result: Tensor, applied: Applied) -> SpmdType:
    """The type of a result; of a whole input one part out of `world` is this rank's, whose number is in no tensor."""
    if not found.is_whole:
        return found
    for tensor, type_ in zip(tensors_in(applied.args), applied.types, strict=True):
        dim = _part_of(result.shape, tensor.shape, applied.world)
        if type_.kind in ("I", "R") and dim is not None:
            return varying(dim)
    return found


def _part_of(part: Sequence[int], whole: Sequence[int], world: int) -> int | None:
    """The dim along which one shape is 1 / world of the other."""
    if len(part) != len(whole):
        return None
    dims = [dim for dim, size in enumerate(part) if size != whole[dim]]
    if len(dims) != 1 or part[dims[0]] * world != whole[dims[0]]:
        return None
    return dims[0]


def _fits(applied: Applied, follower: Follower, typed: Sequence[SpmdType]) -> bool | None:
    """Whether every input gets the gradient of its type; None where that is not known."""
    gradients = []
    for result, type_ in zip(applied.results, typed, strict=True):
        gradient = torch.zeros_like(result, requires_grad=False)
        follower.declare(gradient, _gradient_of(type_))
        gradients.append(gradient)
    node = next(result.grad_fn for result in applied.results if result.grad_fn is not None)

    def run() -> Any:
        with torch.no_grad():
            return applied.backward(node, *gradients)

    try:
        found, violations, is_judged = follower.aside(run)
    except Exception:  # a backward may need what only a real backward pass has
        return None
    if violations:
        return False
    if not is_judged:
        return None
    found = found if isinstance(found, tuple) else (found,)
    judged = list(_judged(applied, follower, found))
    return None if None in judged else all(judged)


def _judged(applied: Applied, follower: Follower, found: Sequence[Any]) -> Any:
    types = iter(applied.types)
    for place, arg in enumerate(applied.args):
        if not isinstance(arg, Tensor):
            for _ in tensors_in(arg):
                next(types)
            continue
        type_ = next(types)
        if not type_.grad:
            continue
        gradient = found[place] if place < len(found) else None
        if not isinstance(gradient, Tensor):
            yield None
            continue
        follower.read(gradient)
        yield _is_gradient_of(type_, follower.type_of(gradient))


def _gradient_of(type_: SpmdType) -> SpmdType:
    if type_.kind == "R":
        return SpmdType("P")
    if type_.kind == "V":
        return varying(type_.dim)
    return SpmdType("I")


def _is_gradient_of(type_: SpmdType, gradient: SpmdType) -> bool | None:
    if gradient.kind in ("U", "C") or gradient.pending is not None or type_.undeclared:
        return None
    if type_.kind == "R":
        return gradient.is_partial_of("sum")
    if type_.kind == "V":
        return gradient.kind != "P"  # this rank's part of what is whole is a V, whose number is in no tensor
    return gradient.is_whole
