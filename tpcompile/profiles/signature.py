"""Arguments of a call -> what a CUDA graph is made for, and the buffers that it reads.

The key of a call is made at every call, the text only before a capture.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from tpcompile.errors import ConfigError

Key: TypeAlias = tuple[Any, ...]
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types whose values are part of a key: what a graph launches may depend on them."""
_PLAIN = (Tensor, nn.Parameter)
"""Types without placements; looking for them would cost time at every call."""


class Leaf(NamedTuple):
    """One value of the arguments, within any tuples, lists and dicts."""

    argument: int | str
    """Position or name."""
    inside: str
    """Place within it, `[2]['x']`."""
    value: Any
    is_static: bool
    """True for an argument that a graph reads, and may write, in place; it is not copied."""

    @property
    def where(self) -> str:
        """`0`, `1[2]`, `mask`."""
        return f"{self.argument}{self.inside}"


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any], static: Collection[int | str]) -> list[Leaf]:
    """All values, in order."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [leaf for name, value in given for leaf in _leaves(Leaf(name, "", value, name in static))]


def _leaves(leaf: Leaf) -> Iterator[Leaf]:
    value = leaf.value
    if isinstance(value, (tuple, list)):
        items: Iterable[tuple[Any, Any]] = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    else:
        yield leaf
        return
    for name, item in items:
        yield from _leaves(leaf._replace(inside=f"{leaf.inside}[{name!r}]", value=item))


def key_of(leaves: list[Leaf], training: tuple[bool, ...]) -> Key:
    """Equal for calls that one graph serves; `training` are the flags of the modules that the program calls."""
    return (_mode(), training, *map(_key, leaves))


def _key(leaf: Leaf) -> Key:
    value = leaf.value
    if isinstance(value, Tensor):
        address = value.data_ptr() if leaf.is_static else 0
        metadata = (value.shape, value.stride(), value.dtype, value.device, value.requires_grad, _placements(value))
        return (leaf.argument, leaf.inside, address, *metadata)
    if isinstance(value, _CONSTANTS):
        return (leaf.argument, leaf.inside, type(value), value)  # True == 1 == 1.0
    return (leaf.argument, leaf.inside, id(value))  # a module: the graph's entry keeps it alive


def _mode() -> Key:
    """Modes of this thread under which a program computes something else."""
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)


def _placements(value: Tensor) -> Any:
    """Placements of a DTensor; None for other tensors."""
    return None if type(value) in _PLAIN else getattr(value, "placements", None)


def text_of(leaves: list[Leaf], training: tuple[bool, ...]) -> str:
    """The key for people and for other ranks: no device index, no address."""
    is_grad, is_inference, autocast = _mode()
    modes = ["grad on" if is_grad else "grad off"]
    if is_inference:
        modes.append("inference mode")
    if autocast is not None:
        modes.append(f"autocast {_dtype(autocast)}")
    if training:
        texts: dict[tuple[bool, ...], str] = {(True,): "training", (False,): "eval"}
        modes.append(texts.get(tuple(set(training)), f"training {training}"))
    arguments = [f"{leaf.where}: {_text(leaf.value)}" for leaf in leaves]
    return f"({', '.join(arguments)}), {', '.join(modes)}"


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__ if isinstance(value, nn.Module) else repr(value)
    found = f"{_dtype(value.dtype)}{list(value.shape)}"
    if not value.is_contiguous():
        found += f" strides {list(value.stride())}"
    if value.requires_grad:
        found += " requires grad"
    placements = _placements(value)
    return f"{found} {placements}" if placements else found


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_arguments(leaves: list[Leaf], label: str, device: torch.device) -> None:
    """Raise ConfigError for what a CUDA graph cannot follow: its value at the capture would stay for ever."""
    for leaf in leaves:
        value, where = leaf.value, f"{label}: argument {leaf.where}"
        if isinstance(value, Tensor):
            if value.device != device:
                raise ConfigError(
                    f"{where} is on {value.device}, and its CUDA graphs are made on {device}, the current device at "
                    "tpcompile.run; move it, or call torch.cuda.set_device before"
                )
        elif not isinstance(value, (*_CONSTANTS, nn.Module)):
            kind = type(value).__name__
            raise ConfigError(
                f"{where} is a {kind}, in which a CUDA graph would not see new tensors; pass tensors and numbers, in "
                "tuples, lists or dicts"
            )


def buffer_for(leaf: Leaf) -> Any:
    """The value as the graph uses it: a tensor of its own with the same values, a static tensor or constant itself."""
    value = leaf.value
    if not isinstance(value, Tensor) or leaf.is_static:
        return value
    with torch.inference_mode(False), torch.no_grad():
        if _placements(value):
            buffer = value.clone()
        else:
            options = {"dtype": value.dtype, "device": value.device}
            buffer = torch.empty_strided(value.shape, value.stride(), **options)  # code is compiled for strides
            copy_into(buffer, value)
    return buffer.detach().requires_grad_(value.requires_grad)


def copy_into(buffer: Tensor, value: Tensor) -> None:
    """Give a buffer of `buffer_for` the values of a tensor with the same metadata."""
    if value is buffer:
        return
    if _placements(value):
        buffer.copy_(value)
        return
    if value.data_ptr() == buffer.data_ptr():
        return
    repeated = [size > 1 for size, stride in zip(value.shape, value.stride(), strict=True) if stride == 0]
    is_expanded = any(repeated)
    if is_expanded:  # torch refuses to copy into it
        buffer, value = _memory_of(buffer), _memory_of(value)
    buffer.copy_(value)


def _memory_of(value: Tensor) -> Tensor:
    """All elements of memory that it spans, once each."""
    extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    return value.as_strided((extent if value.numel() else 0,), (1,))


def filled(args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other values, in the order of `leaves_of`."""
    left = iter(values)  # both take from it in turn
    return _filled(args, left), _filled(kwargs, left)


def _filled(value: Any, left: Iterator[Any]) -> Any:
    if isinstance(value, (tuple, list)):
        items = [_filled(item, left) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return type(value)((name, _filled(item, left)) for name, item in value.items())
    return next(left)
