"""Arguments of a call -> named leaves in call order, and what counts of each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpcompile.evidence.text import normalise
from tpcompile.preflight.fingerprint import bits, describe, local_of
from tpcompile.preflight.weights import Group, Layout, layout_by_dtensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, range, slice)


def named_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> leaf of positional and keyword arguments; descends into lists, tuples, dicts and dataclasses."""
    leaves: dict[str, Any] = {}
    for name, value in [*((f"args[{index}]", value) for index, value in enumerate(args)), *kwargs.items()]:
        leaves |= _walk(name, value)
    return leaves


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Size, Tensor)):
        yield name, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _walk(f"{name}[{key!r}]", child)
    elif isinstance(value, (list, tuple)):
        yield f"len({name})", len(value)
        for index, child in enumerate(value):
            yield from _walk(f"{name}[{index}]", child)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _walk(f"{name}.{field.name}", getattr(value, field.name))
    else:
        yield name, value


def aspects_of(name: str, leaf: Any, group: Group, sharded: Iterable[str]) -> dict[str, str]:
    """Aspects that must be equal: metadata and bits of a tensor, metadata of a shard, value or class of the rest."""
    if not isinstance(leaf, Tensor):
        return {"value": _value_text(leaf)}
    said = layout_by_dtensor(leaf, group)
    is_sharded_dtensor = said is not None and said.layout == Layout.SHARDED
    local = local_of(leaf)
    kind = type(leaf).__qualname__
    if isinstance(leaf, DTensor):
        kind += f" {leaf.placements}"
    aspects = {"class": kind, "dtype": str(leaf.dtype), "dims": str(leaf.dim())}
    aspects["requires_grad"] = str(leaf.requires_grad)
    if is_sharded_dtensor or any(fnmatchcase(name, pattern) for pattern in sharded):
        return aspects
    layout = str(list(local.stride())) if local.layout == torch.strided else str(local.layout)
    device = f"on {local.device.type}"
    return aspects | {
        "shape": str(list(local.shape)),
        "stride": f"{layout} {device}",
        "bits": f"{describe(local)} {bits(local)}",
    }


def _value_text(leaf: Any) -> str:
    text = repr(leaf) if isinstance(leaf, _PLAIN) else f"a {type(leaf).__module__}.{type(leaf).__qualname__}"
    return normalise.device(normalise.objects(text))
