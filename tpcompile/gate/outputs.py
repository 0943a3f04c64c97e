"""What a target returned compiled, in eager and on one device -> the error of each of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpcompile.errors import ConfigError
from tpcompile.numerics import error_ratio
from tpcompile.preflight.fingerprint import fingerprint

Outputs = Mapping[str, Tensor]
"""Tensors of a result by name."""


def kept(result: Any) -> dict[str, Tensor]:
    """Floating tensors and numbers of a result, as they are now: later calls may add to a gradient in place.

    They are named by the keys of a dict, as `forward KEY`; else `forward`, `forward.1`.
    """
    named = [("forward", result)]
    if isinstance(result, Mapping):
        named = [(f"forward {key}", value) for key, value in result.items()]
    found: dict[str, Tensor] = {}
    for name, value in named:
        # A number in the precision of what numbers are read from.
        tensor = torch.tensor(value, dtype=torch.float32) if isinstance(value, float) else value
        found |= error_ratio.named_tensors(tensor, name)
    return {name: tensor.detach().clone() for name, tensor in found.items() if tensor.is_floating_point()}


def values_of(inputs: Any) -> tuple[str, ...]:
    """Fingerprints of the tensors in them, to compare between ranks; none of a DTensor, whose parts differ."""
    return tuple(map(_print, error_ratio.named_tensors(inputs, "").values()))


def _print(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return "DTensor"
    try:
        return fingerprint(tensor)
    except ConfigError:  # a layout without raw bytes
        return "unknown"


def norms(outputs: Outputs) -> tuple[float, ...]:
    """The norm of each tensor, to compare between ranks up to rounding."""
    return tuple(float(tensor.double().norm()) for tensor in outputs.values())


def forget_gradients(*values: Any) -> None:
    """Set the gradients of modules' parameters and of inputs to None, so that the next call's are its own."""
    modules = [value for value in values if isinstance(value, nn.Module)]
    others = [value for value in values if not isinstance(value, nn.Module)]
    tensors = list(error_ratio.named_tensors(others, "").values())
    for module in modules:
        tensors += module.parameters()
    for tensor in tensors:
        if tensor.is_leaf and tensor.requires_grad:
            tensor.grad = None


def whole(outputs: Outputs) -> dict[str, Tensor]:
    """The outputs with the parts of each DTensor gathered; all ranks must call it alike."""
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in outputs.items()}


def errors(
    compiled: Outputs,
    eager: Outputs,
    single: Outputs,
    exact: Outputs,
    normal: Mapping[str, float] | None = None,
    *,
    coarsest: torch.dtype | None = None,
) -> dict[str, dict[str, Any]]:
    """Name -> the error against float64, and `eager NAME` -> the distance between compiled and eager.

    A tensor that one of the runs does not return, or returns in a different shape, has no error that is finite.
    `normal` are single-device errors of tensors of which these are parts, and `coarsest` is a dtype in which they were
    computed.
    """
    compiled, eager, normal = whole(compiled), whole(eager), normal or {}
    right = {"the program": compiled, "the reference": single, "the reference in float64": exact}
    same = {"the program": compiled, "the program in eager": eager}
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys((*exact, *single, *compiled, *eager)):
        unlike = _unlike(name, right)
        of_whole = normal.get(name, 0.0)
        found[name] = unlike or {
            **error_ratio.error_of(compiled[name], single[name], exact[name], whole=of_whole, coarsest=coarsest),
            "times": error_ratio.multiple_of(compiled[name], exact[name]),
        }
        apart = unlike or _unlike(name, same)
        found[f"eager {name}"] = apart or error_ratio.distance(
            compiled[name], eager[name], single[name], exact[name], whole=of_whole, coarsest=coarsest
        )
    return found


def beyond(errors: Mapping[str, Mapping[str, Any]], limit: float) -> list[str]:
    """Names of the tensors with an error beyond the limit."""
    return [name for name, error in errors.items() if not error["ratio"] <= limit]  # NaN is wrong


def _unlike(name: str, runs: Mapping[str, Outputs]) -> dict[str, Any]:
    """The error of a tensor that not all of these runs return in one shape; empty for any other."""
    shapes: dict[str, str] = {}
    for where, outputs in runs.items():
        tensor = outputs.get(name)
        shapes[where] = "None" if tensor is None else f"a tensor {list(tensor.shape)}"
    if len(set(shapes.values())) == 1:
        return {}
    return error_ratio.missing() | {"says": ", ".join(f"{shape} in {where}" for where, shape in shapes.items())}
