"""Module and types by name pattern -> the type of every parameter; what is made of one without a declared layout.

A parameter without a declared layout is taken for replicated. It may be a shard, and what is made of it partial: only
what no such parameter is in, or what went through a collective, is known to be whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import filter as matching

from torch import Tensor, nn

from tpcompile.errors import ConfigError
from tpcompile.nn.sharding import declarations_of
from tpcompile.typecheck.layout import declared_rows
from tpcompile.typecheck.scale import own_scale
from tpcompile.typecheck.site import Site
from tpcompile.typecheck.spmd import Maker, Origin, SpmdType, parse_type, varying
from tpcompile.typecheck.step import Step

Shapes = Mapping[str, Sequence[int]]
_ENTERS = ("copy_to_tp", "scatter_single")
"""Wrappers that leave the value as it is, or take a part of it."""


def types_of_parameters(
    module: nn.Module, given: Mapping[str, str], *, tp: int, full: Shapes
) -> list[tuple[Tensor, SpmdType]]:
    """Parameters with their types; of two types of one parameter the later counts.

    The layouts that the modules declare in `shard_specs()`, else what the shapes on one device, `full`, say; any other
    parameter is I, and undeclared. `given` has types by name pattern, which take the place of these. Raises ConfigError
    for a pattern that fits no parameter, and for a type that does not fit its parameter.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    declared = declarations_of(module)
    undeclared, found = [], []
    for name, parameter in parameters.items():
        whole = SpmdType("I", parameter.requires_grad, scale=own_scale(name))
        if name not in declared and (by_shape := _by_shape(parameter, full.get(name), whole, tp)) is not None:
            found.append((parameter, by_shape))
            continue
        if name not in declared:
            maker: Maker = "hooked" if _has_hook(parameter) else "parameter"
            origin = Origin(f"parameter {name}", Site(), maker=maker)
            undeclared.append((parameter, replace(whole, origin=origin, undeclared=name)))
            continue
        spec = declared[name].spec
        if spec.dim is None:
            found.append((parameter, whole))
            continue
        shard = varying(spec.dim % parameter.dim(), grad=parameter.requires_grad)
        found.append((parameter, replace(shard, replicated_rows=declared_rows(spec, tp), scale=whole.scale)))
    for pattern, text in given.items():
        names = matching(parameters, pattern)
        if not names:
            known = ", ".join(parameters) or "none"
            raise ConfigError(f"parameter_types: {pattern!r} fits no parameter; there are {known}")
        for name in names:
            parameter = parameters[name]
            type_ = parse_type(text, ndim=parameter.dim(), grad=parameter.requires_grad)
            found.append((parameter, replace(type_, scale=own_scale(name))))
    return [*undeclared, *found]  # a tied parameter has the type that one of its modules declares


def _by_shape(parameter: Tensor, full: Sequence[int] | None, whole: SpmdType, tp: int) -> SpmdType | None:
    """The type of a parameter that has another shape on one device; None where the shapes do not say it.

    Whether a hook on its gradient sums it over the ranks, a shape does not say.
    """
    if full is None or len(full) != parameter.dim():
        return None
    dims = [dim for dim, size in enumerate(parameter.shape) if size != full[dim]]
    if not dims:
        return None if _has_hook(parameter) else whole
    is_cut_once = len(dims) == 1 and parameter.shape[dims[0]] in (full[dims[0]] // tp, -(-full[dims[0]] // tp))
    return replace(varying(dims[0], grad=parameter.requires_grad), scale=whole.scale) if is_cut_once else None


def _has_hook(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def with_undeclared(step: Step, types: Sequence[SpmdType]) -> list[SpmdType]:
    """The types, each whole one with the last undeclared parameter among the operands; none behind a collective."""
    names = [type_.undeclared for type_ in step.types if type_.undeclared]
    has_own_value = step.is_collective and step.name not in _ENTERS
    if not names or has_own_value:
        return list(types)
    # Only of a whole value it decides anything.
    return [replace(type_, undeclared=names[-1]) if type_.kind in ("I", "R") else type_ for type_ in types]


def is_known_whole(step: Step, x: SpmdType) -> bool:
    """True unless an undeclared parameter decides whether the operand is whole; the step is then not judged."""
    if x.undeclared:
        step.is_judged = False
        step.why_not_judged = f"no layout is declared for parameter {x.undeclared}"
    return not x.undeclared
