"""A group -> memory through which its ranks sum messages, which all GPUs of the group map.

One for each group, for the calls of one stream at a time: a call on a different stream than the call before waits for
that on the device. A CUDA graph keeps the addresses of its capture, so memory that was too small is kept when larger
memory replaces it, and none is made within a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tpcompile.errors import ConfigError
from tpcompile.torch_api import symmetric
from tpcompile.torch_api.c10d import group_of_name

LEAST_BYTES = 1 << 20
"""Least memory that is made: to grow is a collective, and the memory before is kept for CUDA graphs."""


OF_GROUPS: dict[tuple[str, torch.device], Workspace] = {}


class Workspace:
    """The memory of one group and device, which grows outside of captures."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self._device = group, device
        self._made: list[Tensor] = []
        """Memory in the order in which it was made; the last is the largest, and in use."""
        self._stream: Any = None
        """Stream of the last call."""

    @property
    def size_bytes(self) -> int:
        """Largest message that it holds."""
        return self._made[-1].numel() if self._made else 0

    def view_like(self, x: Tensor) -> Tensor:
        """The beginning of the memory as a contiguous tensor like `x`.

        Collective where it is too small: all ranks make larger memory. Raises ConfigError, on all of them, where that
        is within a capture.
        """
        num_bytes = x.numel() * x.itemsize
        if num_bytes > self.size_bytes:
            check_may_grow(num_bytes, self.size_bytes, self._device)
            size = max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            self._made.append(symmetric.memory(size, group=self.group, device=self._device))
        if self._device.type == "cuda":
            last, self._stream = self._stream, torch.cuda.current_stream(self._device)
            is_same = last in (None, self._stream)
            if not (is_same or is_capturing(self._device)):  # what is captured does not run yet
                self._stream.wait_event(last.record_event())
        return self._made[-1][:num_bytes].view(x.dtype).view(x.shape)


def workspace_of(group_name: str, device: torch.device) -> Workspace:
    """The workspace of a group, the same at every call as long as the group exists."""
    return of_group(OF_GROUPS, group_name, device, Workspace)


def of_group(
    known: dict[tuple[str, torch.device], Any], group_name: str, device: torch.device, make: Callable[..., Any]
) -> Any:
    """The object of a group and device, which `make` makes of both at the first call; it has the `group`."""
    group, found = group_of_name(group_name), known.get((group_name, device))
    if found is None or found.group is not group:  # a later group may have the name of one that was destroyed
        found = known[group_name, device] = make(group, device)
    return found


@contextmanager
def apart(known: dict[tuple[str, torch.device], Any], group_name: str, device: torch.device) -> Iterator[None]:
    """A context in which the group has an object of its own, which ends with it: one that it had keeps its memory."""
    before = known.pop((group_name, device), None)
    try:
        yield
    finally:
        known.pop((group_name, device), None)
        if before is not None:
            known[group_name, device] = before


def check_may_grow(num_bytes: int, size_bytes: int, device: torch.device) -> None:
    """Raise ConfigError while a CUDA graph is captured: memory of `size_bytes` is too small for a message."""
    if is_capturing(device):
        raise ConfigError(
            f"an all-reduce of {num_bytes} bytes does not fit into the workspace of {size_bytes} bytes, which cannot "
            "grow while a CUDA graph is captured; call the program with this shape before the capture"
        )


def is_capturing(device: torch.device) -> bool:
    """True when the current stream of a GPU is captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
