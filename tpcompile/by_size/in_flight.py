"""An all-reduce of two ranks in flight, by copy engines: a kernel of NCCL waits for a place beside matrix products.

    pushed = all_reduce_push_start(x, after, slot, num_slots, meets, group)
    y = all_reduce_push_finish(pushed, x, after, slot, group)

Each rank copies its `x` into memory of its peer on a stream of its own, and the finish adds what the peer has sent: the
same bits on both ranks. `after` are results that must be there before: they put the ops of a graph into one order, and
each finish behind the work that hides it, which no pass of a compiler can change.

Memory. Slot `slot` of `num_slots` holds one message. A rank may write it when its peer has read what was there. With at
most m sums in flight, finished in the order of their starts, and `num_slots` >= 2 m taken in turn: between starts i and
i + 2 m of a slot lies start i + m, which the peer makes after it has finished i, and which this rank finishes before it
starts i + 2 m. The first start of a call meets the peer: all that was before on the peer's stream is over then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpcompile.by_size.workspace import check_may_grow, is_capturing, of_group
from tpcompile.torch_api import c10d, symmetric

_LEAST_BYTES = 1 << 20
_OF_GROUPS: dict[tuple[str, torch.device], Slots] = {}


@torch.library.custom_op("tpcompile::all_reduce_push_start", mutates_args=())
def start(x: Tensor, after: list[Tensor], slot: int, num_slots: int, meets: bool, group_name: str) -> Tensor:
    """Send `x`, contiguous, to the other rank of the group -> what the finish is given, [0].

    A collective: both ranks make equal calls in the same order. `meets` in the first start of a call. Raises
    ConfigError where memory would have to grow while a CUDA graph is captured.
    """
    _slots_of(group_name, x.device).start(x, slot, num_slots, meets=meets)
    return x.new_empty(0)


@start.register_kernel("cpu")
@start.register_fake
def _(x: Tensor, after: list[Tensor], slot: int, num_slots: int, meets: bool, group_name: str) -> Tensor:
    return x.new_empty(0)


@torch.library.custom_op("tpcompile::all_reduce_push_finish", mutates_args=())
def finish(started: Tensor, x: Tensor, after: list[Tensor], slot: int, group_name: str) -> Tensor:
    """The sum of both ranks' `x`. On a CPU the functional all-reduce, here."""
    return _slots_of(group_name, x.device).finish(x, slot)


@finish.register_kernel("cpu")
def _(started: Tensor, x: Tensor, after: list[Tensor], slot: int, group_name: str) -> Tensor:
    return c10d.end(*c10d.functional_sum(x, group_name))


@finish.register_fake
def _(started: Tensor, x: Tensor, after: list[Tensor], slot: int, group_name: str) -> Tensor:
    return torch.empty_like(x)


START = torch.ops.tpcompile.all_reduce_push_start.default
FINISH = torch.ops.tpcompile.all_reduce_push_finish.default


class Slots:
    """The memory of a group and device, the stream of its copies, and what is in flight."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._made: list[tuple[int, symmetric.PeerMemory]] = []
        """Bytes of a slot, and the memory; the last is in use. A CUDA graph keeps what it was captured with."""
        self._stream = torch.cuda.Stream(device, priority=-1)  # its small kernels come before those of a product
        self._arriving: dict[int, tuple[torch.cuda.Event, Tensor]] = {}
        """Slot -> when its message is there, and where: later messages may be in larger memory."""
        self._last: Any = None
        """Stream of the last call."""

    def start(self, x: Tensor, slot: int, num_slots: int, *, meets: bool) -> None:
        """Queue the copy, behind all that is queued on the current stream."""
        num_bytes = x.numel() * x.itemsize
        slot_bytes, memory = self._memory_for(num_bytes, num_slots)
        begin = slot * slot_bytes
        received = memory.own[begin : begin + num_bytes].view(x.dtype).view(x.shape)
        self._wait_for_calls(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if meets:
                memory.meet(channel=0)
            memory.push(x, begin)
            memory.meet(channel=1 + slot)
            self._arriving[slot] = self._stream.record_event(), received

    def finish(self, x: Tensor, slot: int) -> Tensor:
        """`x` and what the peer has sent."""
        arrived, received = self._arriving.pop(slot)
        torch.cuda.current_stream(self._device).wait_event(arrived)
        return x + received

    def _wait_for_calls(self, stream: Any) -> None:
        """The copies wait for what is queued on the stream of this call, and of the call before."""
        last, self._last = self._last, stream
        self._stream.wait_stream(stream)
        is_same = last in (None, stream)
        if not (is_same or is_capturing(self._device)):  # what is captured does not run yet
            self._stream.wait_stream(last)

    def _memory_for(self, num_bytes: int, num_slots: int) -> tuple[int, symmetric.PeerMemory]:
        slot_bytes, memory = self._made[-1] if self._made else (0, None)
        if memory is not None and num_bytes <= slot_bytes and memory.own.numel() >= num_slots * slot_bytes:
            return slot_bytes, memory
        check_may_grow(num_bytes, slot_bytes, self._device)
        slot_bytes = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length(), slot_bytes)
        made = symmetric.PeerMemory(num_slots * slot_bytes, group=self.group, device=self._device)
        self._made.append((slot_bytes, made))
        return slot_bytes, made


def _slots_of(group_name: str, device: torch.device) -> Slots:
    return of_group(_OF_GROUPS, group_name, device, Slots)
