"""Module and types by name pattern -> the type of every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import filter as matching

from torch import Tensor, nn

from tpcompile.errors import ConfigError
from tpcompile.nn.sharding import declarations_of
from tpcompile.typecheck.replicated import declared_rows
from tpcompile.typecheck.scale import own_scale
from tpcompile.typecheck.site import Site
from tpcompile.typecheck.spmd import Origin, SpmdType, parse_type, varying

Typed = list[tuple[Tensor, SpmdType]]


def types_of_parameters(module: nn.Module, given: Mapping[str, str], *, tp: int) -> Typed:
    """Parameters with their types; of two types of one parameter the later counts.

    The layouts that the modules declare in `shard_specs()`; any other parameter is I, and undeclared. `given` has types
    by name pattern, which take the place of these. Raises ConfigError for a pattern that fits no parameter, and for a
    type that does not fit its parameter.
    """
    return [*_declared(module, tp), *_given(module, given)]


def _declared(module: nn.Module, tp: int) -> Typed:
    declared = declarations_of(module)
    laid_out: Typed = []
    others: Typed = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        scale = own_scale(name)
        if name in declared:
            spec, type_ = declared[name].spec, SpmdType("I", parameter.requires_grad)
            if spec.dim is not None:
                shard = varying(spec.dim % parameter.dim(), grad=parameter.requires_grad)
                type_ = replace(shard, replicated_rows=declared_rows(spec, tp))
            laid_out.append((parameter, replace(type_, scale=scale)))
        else:
            origin = Origin(f"parameter {name}", Site(), maker="parameter")
            type_ = SpmdType("I", parameter.requires_grad, scale=scale, origin=origin)
            others.append((parameter, type_))
    return [*others, *laid_out]  # a tied parameter has the type that one of its modules declares


def _given(module: nn.Module, types: Mapping[str, str]) -> Typed:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found: Typed = []
    for pattern, text in types.items():
        names = matching(parameters, pattern)
        if not names:
            known = ", ".join(parameters) or "none"
            raise ConfigError(f"parameter_types: {pattern!r} fits no parameter; there are {known}")
        for name in names:
            parameter = parameters[name]
            type_ = parse_type(text, ndim=parameter.dim(), grad=parameter.requires_grad)
            found.append((parameter, replace(type_, scale=own_scale(name))))
    return found
