"""Module and types by name pattern -> the type of every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import filter as matching

from torch import Tensor, nn

from tpcompile.errors import ConfigError
from tpcompile.nn.sharding import declarations_of
from tpcompile.typecheck.layout import declared_rows
from tpcompile.typecheck.scale import own_scale
from tpcompile.typecheck.site import Site
from tpcompile.typecheck.spmd import Origin, SpmdType, parse_type, varying


def types_of_parameters(module: nn.Module, given: Mapping[str, str], *, tp: int) -> list[tuple[Tensor, SpmdType]]:
    """Parameters with their types; of two types of one parameter the later counts.

    The layouts that the modules declare in `shard_specs()`; any other parameter is I, and undeclared. `given` has types
    by name pattern, which take the place of these. Raises ConfigError for a pattern that fits no parameter, and for a
    type that does not fit its parameter.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    declared = declarations_of(module)
    undeclared, found = [], []
    for name, parameter in parameters.items():
        whole = SpmdType("I", parameter.requires_grad, scale=own_scale(name))
        if name not in declared:
            origin = Origin(f"parameter {name}", Site(), maker="parameter")
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
