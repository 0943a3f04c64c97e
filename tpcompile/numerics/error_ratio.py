"""A tensor, its single-device value and its float64 value -> error, as a multiple of the single-device error.

A fixed tolerance hides bugs in float32 and gives false positives in bfloat16, so the normal error is measured: that of
the same module on one device in the same dtype. Errors are relative, in the norm of the tensor. A rank's slice can be a
few numbers, which the single device got right by chance: the normal error is the larger of those on slice and whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Errors = dict[str, dict[str, float]]
"""Name of a tensor -> `error`, `single` (the single-device error), their `ratio`; whether it `is_judged` by that."""

_FLOAT64_UNIT = 256 * torch.finfo(torch.float64).eps
_MOST_ROUNDING, _ROUNDINGS = 0.25, 1e5
"""Largest relative error of one device that is rounding, also in float8; and in units of the dtype's last place. What
is further from float64 differs by something else, such as other random numbers, and says nothing about the program."""
_NO_MULTIPLE = 1e-2
"""Largest relative distance of a tensor from a multiple of the right one that counts as rounding, also in bfloat16."""
_FEW = 64
"""Numbers below which the ratio of two errors scatters by more than a limit near 2.5 allows."""


def error_of(
    got: Tensor, single: Tensor, exact: Tensor, *, whole: float = 0.0, coarsest: torch.dtype | None = None
) -> dict[str, float]:
    """Relative errors of `got` and `single` against `exact` (float64), and their ratio; NaN stays NaN.

    `whole` is the single-device error of the tensor these are slices of, and `coarsest` a dtype in which it was
    computed, where that is not its own: `gradient.float()` has the error of bfloat16.
    """
    error = relative(got, exact)
    normal = max(whole, relative(single, exact))
    return _measured(error, normal, got, coarsest)


def relative(got: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm of `exact` (float64)."""
    return float((got.double() - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny))


def multiple_of(got: Tensor, exact: Tensor) -> float | None:
    """The number that `got` is `exact` (float64) times; None where it is no multiple, or is nothing."""
    square = float(exact.square().sum())
    if not square:
        return None
    factor = float((got.double() * exact).sum()) / square
    is_multiple = float((got.double() - factor * exact).norm()) <= _NO_MULTIPLE * abs(factor) * square**0.5
    return factor if is_multiple and factor else None


def missing() -> dict[str, float]:
    """The error of a missing tensor."""
    return {"error": 1.0, "single": 0.0, "ratio": float("inf")}


def distance(
    one: Tensor,
    two: Tensor,
    single: Tensor,
    exact: Tensor,
    *,
    whole: float = 0.0,
    coarsest: torch.dtype | None = None,
) -> dict[str, float]:
    """How far two results of the same maths are apart, in units of the single-device error.

    The distance is relative to the larger of `two` and `exact`: rounding grows with what is rounded, right or wrong.
    """
    normal = max(whole, relative(single, exact))
    size = torch.maximum(two.double().norm(), exact.norm()).clamp_min(torch.finfo(torch.float64).tiny)
    apart = float((one.double() - two.double()).norm() / size)
    return _measured(apart, normal, one, coarsest)


def _measured(error: float, normal: float, got: Tensor, coarsest: torch.dtype | None) -> dict[str, float]:
    dtypes = [dtype for dtype in (got.dtype, coarsest) if dtype is not None and dtype.is_floating_point]
    credible = min(_MOST_ROUNDING, _ROUNDINGS * max((torch.finfo(dtype).eps for dtype in dtypes), default=1.0))
    return {"error": error, "single": normal, "ratio": error / _allowed(normal, got), "is_judged": normal <= credible}


def named_tensors(value: Any, root: str) -> dict[str, Tensor]:
    """Tensors of nested tuples, lists and dicts: the first is `root`, others `root.PLACE`, a field or an index."""
    return {root if index == 0 else f"{root}.{place}": t for index, (place, t) in enumerate(_walk(value, ""))}


def replaced(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The same structure with its tensors, in the order of `named_tensors`, replaced."""
    return _rebuilt(value, iter(tensors))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The same values with floating tensors in `dtype`; masks, ids and seeds keep theirs.

    A tensor that requires a gradient becomes a leaf that does too.
    """
    tensors = []
    for tensor in named_tensors(value, "").values():
        if tensor.is_floating_point():
            tensor = tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
        tensors.append(tensor)
    return replaced(value, tensors)


def _walk(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
        return
    for key, item in _items(value):
        path = f"{place}.{key}" if place else key
        yield from _walk(item, path)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """(key, field or index; item) of a container; nothing of any other value."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", range(len(value)))
        pairs = zip(names, value, strict=True)
    for key, item in pairs:
        yield str(key), item


def _rebuilt(value: Any, left: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(left)
    if isinstance(value, dict):
        return {key: _rebuilt(item, left) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_rebuilt(item, left) for item in value]
        make = getattr(type(value), "_make", type(value))  # the constructor of a NamedTuple takes no sequence
        return make(items)
    return value


def _allowed(normal: float, got: Tensor) -> float:
    """The unit of a ratio: the single-device error, and at least a quarter ulp.

    Without the quarter ulp, any error in a tensor that one device computes exactly would have an infinite ratio. The
    norms of two sets of n roundings differ by a factor that grows as 1 / sqrt(n): for few numbers the unit grows alike.
    """
    scatter = max(1.0, (_FEW / max(1, got.numel())) ** 0.5)
    floor = _FLOAT64_UNIT  # compared with float64, float64 on one device has no error to measure by
    if got.dtype.is_floating_point and got.dtype != torch.float64:
        floor = torch.finfo(got.dtype).eps / 4
    return max(normal, floor) * scatter
