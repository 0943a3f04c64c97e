"""A module and its inputs -> every op of one eager run: its line, what it was given, a fingerprint of its result.

A fingerprint is short, so a run of any size can be kept; and linear, so the sum of those of all ranks is that of the
sum over the ranks. Seen on torch 2.11.0 and 2.13.0: the weak dictionary of `torch.utils.weak`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.text.lines import line_of_frame
from tpcompile.torch_api.dispatch import AsyncCollectiveTensor, TorchDispatchMode, tree_flatten

Fingerprint = tuple[float, ...]
"""Sums of a tensor under pseudo-random signs: they are about as large as its norm, also those of a difference."""

NUM_SUMS = 8
"""Numbers of a fingerprint."""
_TABLE_LENGTH = 2**16
"""Elements whose signs are kept, 4 MiB a device."""
_WAIT = "_c10d_functional.wait_tensor"
_PENDING = ("_c10d_functional.", "c10d.")
"""Ops whose result is not there yet when they return."""
_MIXERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Constants of the SplitMix64 generator, as signed numbers."""


@dataclass(frozen=True)
class Value:
    """The result of one op, or a tensor that the run was given."""

    name: str
    """The op, or the parameter or buffer; `an input` for others."""
    shape: tuple[int, ...]
    tensor: Fingerprint | None
    """None for the result of a collective that was not there yet."""
    parts: tuple[tuple[tuple[int, ...], Fingerprint], ...]
    """Shapes and fingerprints of a rank's equal parts of it, along each dim."""
    line: UserLine | None
    """Line of the op; for a tensor that was given, the line of its first use."""
    sources: tuple[int, ...] = ()
    """Places of what the op was given."""


@dataclass
class Trace:
    """Values in the order in which they were made."""

    values: list[Value] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    """Name of a module -> the values that it returned last."""


def traced(module: nn.Module, inputs: tuple[Any, ...], *, rank: int = 0, size: int = 1) -> Trace:
    """Run the module in eager, without gradients; `parts` are those of one rank of `size`."""
    named = [*module.named_parameters(), *module.named_buffers()]
    mode = _Tracing({id(tensor): name for name, tensor in named}, rank=rank, size=size)
    handles = [each.register_forward_hook(mode.keeping(name)) for name, each in module.named_modules()]
    try:
        with torch.no_grad(), mode:
            module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return mode.trace


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Equal on all devices up to rounding."""
    numbers = tensor.detach().double().flatten()
    length = numbers.numel()
    if length <= _TABLE_LENGTH:
        return tuple((_table(numbers.device)[:, :length] @ numbers).tolist())
    place = torch.arange(length, device=numbers.device)
    sums = [(numbers * _signs(place, number)).sum() for number in range(NUM_SUMS)]
    return tuple(torch.stack(sums).tolist())


@functools.cache
def _table(device: torch.device) -> Tensor:
    """The signs of all sums for the first places: making them for each tensor takes longer than the sums."""
    place = torch.arange(_TABLE_LENGTH, device=device)
    return torch.stack([_signs(place, number) for number in range(NUM_SUMS)])


def _signs(place: Tensor, number: int) -> Tensor:
    mixed = place * NUM_SUMS + number + 1
    for mixer in _MIXERS:
        mixed = mixed * mixer
        mixed = mixed ^ (mixed >> 29)
    return torch.where((mixed >> 40) & 1 == 0, 1.0, -1.0).double()


class _Tracing(TorchDispatchMode):
    def __init__(self, names: dict[int, str], *, rank: int, size: int) -> None:
        super().__init__()
        self.trace = Trace()
        self._names, self._rank, self._size = names, rank, size
        self._places: Any = WeakTensorKeyDictionary()

    def keeping(self, name: str) -> Any:
        """A forward hook that keeps the places of what a module returns."""

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self.trace.outputs[name] = [self._places[tensor] for tensor in _tensors(output) if tensor in self._places]

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        line: UserLine | None = line_of_frame(sys._getframe(1))
        sources = tuple(self._place_of(tensor, line) for tensor in given)
        out = func(*args, **kwargs)
        name = func._schema.name.replace("::", ".")
        results = list(_tensors(out))
        if func._schema.is_mutable or name.startswith("c10d."):
            results += given
        if name == _WAIT:
            values = [self.trace.values[place] for place in sources]
            pending = [value for value in values if value.tensor is None]
            if pending:  # the collective was seen: the result is its
                name, line = pending[0].name, pending[0].line
        for tensor in results:
            self._keep(tensor, name, line, sources)
        return out

    def _place_of(self, tensor: Tensor, line: UserLine | None) -> int:
        if tensor not in self._places:
            self._keep(tensor, self._names.get(id(tensor), "an input"), line, ())
        return int(self._places[tensor])

    def _keep(self, tensor: Tensor, name: str, line: UserLine | None, sources: tuple[int, ...]) -> None:
        is_waited = any(self.trace.values[place].tensor is None for place in sources)
        is_pending = name.startswith(_PENDING) and not is_waited
        shape = tuple(tensor.shape)
        numbers = None if is_pending else fingerprint(tensor)
        parts = () if is_pending else tuple(self._parts(tensor))
        self._places[tensor] = len(self.trace.values)
        self.trace.values.append(Value(name, shape, numbers, parts, line, sources))

    def _parts(self, tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Fingerprint]]:
        if self._size == 1:
            return
        for dim, length in enumerate(tensor.shape):
            if length and length % self._size == 0:
                part = tensor.chunk(self._size, dim)[self._rank]
                yield tuple(part.shape), fingerprint(part)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors with values; the result of a functional collective may still be in flight."""
    leaves, _ = tree_flatten(value)
    for leaf in leaves:
        tensor = leaf
        if isinstance(leaf, AsyncCollectiveTensor):
            tensor = leaf.elem
        is_plain = type(tensor) in (Tensor, nn.Parameter)  # no DTensor, which has a value on no rank
        if not is_plain or tensor.is_meta or tensor.is_complex():
            continue
        yield tensor
