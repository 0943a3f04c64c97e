"""Values that the program says are equal on all ranks -> hashes, without waiting for the device.

On a GPU the hash is computed in the order of the stream and copied to pinned memory; a later call of `agree` finds that
it has arrived. Only the thread that calls asks the device: a query from a different one would break the capture of a
CUDA graph.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpcompile.errors import ConfigError
from tpcompile.preflight.fingerprint import describe, local_of
from tpcompile.preflight.inputs import named_leaves
from tpcompile.preflight.weights import Group, Layout, layout_by_dtensor
from tpcompile.sentinel import flight
from tpcompile.sentinel.agreement import MAX_NAME, Chain, Links, Span, Value
from tpcompile.sentinel.device_sums import LANES, sums
from tpcompile.torch_api import watching

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_SHOWN = (bool, int, float, type(None))
"""Classes whose values a finding shows; of texts and containers it has a hash, as they may be private."""
_MAX_SHOWN = 32
_MAX_WAITING = 4096
"""Hashes under way: more than a GPU lets a program be ahead, by the kernels that its queue holds."""
_BETWEEN = (watching.TORCH, __file__.rpartition("/")[0])
"""Folders whose frames are between a call and the program."""
_Place = tuple[str, int, str]
"""File, line and function of a call."""


class _Hashed(NamedTuple):
    """A value whose hash may be under way."""

    name: str
    call: int
    what: str
    sums: Tensor | None
    """[LANES] int64 in host memory; None for a Python value."""
    bits: str
    event: torch.cuda.Event | None
    """Recorded behind the copy of the sums; None where they are there."""
    place: _Place | None
    step: int | None


class AgreedValues:
    """Those of one rank, in the order of its calls."""

    def __init__(self, axis: str, members: Sequence[int]) -> None:
        self._group = Group(axis, tuple(members))
        self._calls: Counter[str] = Counter()
        self._waiting: deque[_Hashed] = deque()
        self._chain = Chain()
        self._rows: tuple[Tensor, ...] = ()
        """Pinned memory for sums under way, [LANES] each, used in turn; from the first value on a GPU on."""
        self._num_rows = 0
        self._events: list[torch.cuda.Event] = []
        """To be used again: to make one costs as much as a kernel."""
        self._lock = threading.Lock()

    def add(self, name: str, value: Any, *, every: int, step: int | None, frame: FrameType | None) -> None:
        """Count a call of `agree`, and hash its value if it is the first of `every` calls.

        Raises ConfigError for a value that cannot be compared.
        """
        self._calls[name] += 1
        call = self._calls[name]
        if (call - 1) % every:
            return
        while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):  # neither torch's nor ours
            frame = frame.f_back
        place = None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
        for hashed in self._hashed(name, value, call, place, step):
            with self._lock:
                self._waiting.append(hashed)
            self.settle(waits=len(self._waiting) == _MAX_WAITING)

    def settle(self, *, waits: bool = False) -> None:
        """Append the values whose hashes have arrived, in order; with `waits` all."""
        with self._lock:
            while self._waiting:
                event = self._waiting[0].event
                if event is not None and waits:
                    event.synchronize()
                if event is not None and not event.query():
                    break
                arrived = self._waiting.popleft()
                self._chain.add(_value(arrived))
                self._events += [] if arrived.event is None else [arrived.event]

    def links(self, *, is_over: bool = False) -> Links:
        """What the other ranks compare."""
        with self._lock:
            return self._chain.links(is_over=is_over)

    def values(self, span: Span) -> dict[int, Value]:
        """Number -> value in the span, as far as they are remembered."""
        with self._lock:
            return self._chain.values(span)

    def newest(self) -> dict[int, Value]:
        """The values that this rank leaves behind."""
        with self._lock:
            return self._chain.newest()

    def _hashed(self, name: str, value: Any, call: int, place: _Place | None, step: int | None) -> Iterator[_Hashed]:
        plain: list[str] = []
        for leaf_name, leaf in named_leaves(name, value):
            if isinstance(leaf, Tensor):
                for part_name, part in self._parts(leaf_name, leaf):
                    found, event = self._on_host(sums(part))
                    yield _Hashed(part_name, call, describe(part), found, "", event, place, step)
            else:
                plain.append(f"{leaf_name}={_plain(leaf_name, leaf)}")
        if plain:
            what, bits = _said(value, plain)
            yield _Hashed(name, call, what, None, bits, None, place, step)

    def _on_host(self, on_device: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Sums in host memory, and what says that they have arrived there."""
        if on_device.device.type != "cuda":
            return on_device.cpu(), None
        if not self._rows:
            self._rows = torch.empty(_MAX_WAITING, LANES, dtype=torch.int64, pin_memory=True).unbind()
        host = self._rows[self._num_rows % _MAX_WAITING]
        self._num_rows += 1
        host.copy_(on_device, non_blocking=True)
        event = self._events.pop() if self._events else torch.cuda.Event()
        event.record(torch.cuda.current_stream(on_device.device))
        return host, event

    def _parts(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensor of this rank, or the tensors that a wrapper holds."""
        said = layout_by_dtensor(tensor, self._group)
        placements = getattr(tensor, "placements", ())
        is_sharded = (
            any(not one.is_replicate() for one in placements) if said is None else said.layout != Layout.REPLICATED
        )
        if is_sharded:
            raise ConfigError(
                f"agree({name!r}): a DTensor with placements {placements} is not equal on ranks {self._group.ranks}; "
                "pass `.full_tensor()`, or what is replicated"
            )
        local = local_of(tensor)
        if local.is_meta:
            raise ConfigError(f"agree({name!r}): a meta tensor has no data; pass one on a device")
        if local.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigError(f"agree({name!r}) cannot be part of a CUDA graph; call it after the replay")
        if not hasattr(local, "__tensor_flatten__"):
            yield name, local
            return
        names, _ = local.__tensor_flatten__()
        for inner in names:
            yield from self._parts(f"{name}.{inner}", getattr(local, inner))


def check_arguments(name: object, every: object) -> None:
    """Raise ConfigError for a name or a number that `agree` cannot use."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ConfigError(f"agree: the name {name!r} must be a text of 1 to {MAX_NAME} characters")
    if type(every) is not int or every < 1:
        raise ConfigError(f"agree({name!r}): every={every!r} must be a whole number of calls, 1 or more")


def _plain(name: str, leaf: Any) -> str:
    if isinstance(leaf, _PLAIN):
        return f"{type(leaf).__name__} {leaf!r}"
    if isinstance(leaf, torch.Size):
        return repr(leaf)
    raise ConfigError(
        f"agree({name!r}): a {type(leaf).__qualname__} cannot be compared; pass tensors, numbers, texts, or containers "
        "of them"
    )


def _said(value: Any, plain: Sequence[str]) -> tuple[str, str]:
    """What a Python value is, and a hash of it where that does not say all."""
    shown = repr(value)[: _MAX_SHOWN + 1] if type(value) in _SHOWN else ""
    if 0 < len(shown) <= _MAX_SHOWN:
        return shown, ""
    return type(value).__name__, blake2b("\n".join(plain).encode(), digest_size=16).hexdigest()


def _value(hashed: _Hashed) -> Value:
    bits = hashed.bits
    if hashed.sums is not None:
        bits = "".join(f"{lane & (1 << 64) - 1:016x}" for lane in hashed.sums.tolist())
    line = flight.user_line(*hashed.place) if hashed.place is not None else None
    return Value(name=hashed.name, call=hashed.call, what=hashed.what, bits=bits, line=line, step=hashed.step)
