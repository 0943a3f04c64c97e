"""An all-reduce of two ranks in flight, by copy engines: a kernel of NCCL waits for a place beside matrix products.

    started = all_reduce_push_start(x, after, slot, num_slots, meets, group)
    part = all_reduce_push_receive(after, x.numel(), x.dtype, slot, group)
    y = x + part[: x.numel()].view(x.shape)
    released = all_reduce_push_release(h, after)

    x = all_reduce_push_product(a, b, after, slot, num_slots, meets, group)

The last is x = a @ b and its start in one, where no other work is beside the sum: it computes x in parts of some rows,
and sends each part while it computes the next.

Each rank copies its `x` into memory of its peer on a stream of its own. What the peer has sent is not copied again:
`part` is the memory itself, and the addition belongs to the kernel that the compiler makes of it and of what follows.
Both ranks add the same two numbers, and have the same bits. `h` is what that kernel writes: `y`, or something through
which alone `y` is read. So no kernel behind the release reads `part`.

`after` are results that must be there before: they put the ops of a graph into one order, and each receive behind the
work that hides it, which no pass of a compiler can change. Each op is given the one before in `after` alone: torch 2.11
writes out what a new op is computed from, which would double with each op that is reached in two ways.

Memory. Slot `slot` of `num_slots` holds one message. A rank may write it when its peer has read what was there. With at
most m sums in flight, released in the order of their starts, and `num_slots` >= 2 m taken in turn: between starts i and
i + 2 m of a slot lies start i + m, which the peer makes after it has released i, and whose message this rank releases
before it starts i + 2 m. The copies of a start wait for all kernels that were launched before it. The first start of a
call meets the peer: all that was before on the peer's stream is over then.

A compiler takes the memory of a result that is read no more for a later one of the same size, or of 95 % of it. The
peer may write to `part` by then, so `part` is longer than `x` by an eighth and a few elements: no other result has that
size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tpcompile.by_size.pushed_sums import Pushing
from tpcompile.by_size.workspace import LEAST_BYTES, check_may_grow, is_capturing, of_group
from tpcompile.torch_api import c10d, symmetric

_TILE_HEIGHT, _TILE_WIDTH = 256, 128
"""Size of the tiles of the largest products on Hopper."""
_UNIT = 128
"""Rows of a part are a multiple of it."""
OF_GROUPS: dict[tuple[str, torch.device], Slots] = {}
_GATHERED: dict[tuple[str, int], Tensor] = {}
"""Group and slot -> what a CPU has gathered and not received yet."""


@torch.library.custom_op("tpcompile::all_reduce_push_start", mutates_args=())
def start(x: Tensor, after: list[Tensor], slot: int, num_slots: int, meets: bool, group_name: str) -> Tensor:
    """Send `x`, contiguous, to the other rank of the group, until its receive -> what the next op is behind, [0].

    A collective: both ranks make equal calls in the same order. `meets` in the first start of a call. Raises
    ConfigError where memory would have to grow while a CUDA graph is captured.
    """
    _slots_of(group_name, x.device).start(x, [x], slot, num_slots, meets=meets)
    return x.new_empty(0)


@start.register_kernel("cpu")
def _(x: Tensor, after: list[Tensor], slot: int, num_slots: int, meets: bool, group_name: str) -> Tensor:
    _gather(x, slot, group_name)
    return x.new_empty(0)


@start.register_fake
def _(x: Tensor, after: list[Tensor], slot: int, num_slots: int, meets: bool, group_name: str) -> Tensor:
    return x.new_empty(0)


@torch.library.custom_op("tpcompile::all_reduce_push_product", mutates_args=())
def product(
    a: Tensor, b: Tensor, after: list[Tensor], slot: int, num_slots: int, meets: bool, group_name: str
) -> Tensor:
    """[m, k] @ [k, n] -> [m, n] of this rank, on its way to the other one; otherwise as `start`."""
    x = a.new_empty(len(a), b.shape[1])
    _slots_of(group_name, a.device).start(x, _computed(a, b, x), slot, num_slots, meets=meets)
    return x


@product.register_kernel("cpu")
def _(a: Tensor, b: Tensor, after: list[Tensor], slot: int, num_slots: int, meets: bool, group_name: str) -> Tensor:
    x = a @ b
    _gather(x, slot, group_name)
    return x


@product.register_fake
def _(a: Tensor, b: Tensor, after: list[Tensor], slot: int, num_slots: int, meets: bool, group_name: str) -> Tensor:
    return a.new_empty(len(a), b.shape[1])


@torch.library.custom_op("tpcompile::all_reduce_push_receive", mutates_args=())
def receive(after: list[Tensor], num_elements: int, dtype: torch.dtype, slot: int, group_name: str) -> Tensor:
    """What the other rank has sent, flat, [received_size] with anything behind it.

    On a CPU the start gathers it.
    """
    return _slots_of(group_name, after[0].device).receive(slot)


@receive.register_kernel("cpu")
def _(after: list[Tensor], num_elements: int, dtype: torch.dtype, slot: int, group_name: str) -> Tensor:
    return _GATHERED.pop((group_name, slot))


@receive.register_fake
def _(after: list[Tensor], num_elements: int, dtype: torch.dtype, slot: int, group_name: str) -> Tensor:
    return after[0].new_empty(received_size(num_elements), dtype=dtype)


@torch.library.custom_op("tpcompile::all_reduce_push_release", mutates_args=())
def release(read: Tensor, after: list[Tensor]) -> Tensor:
    """What was received is read no more, once `read` is there -> what the next op is behind, [0]."""
    return read.new_empty(0)


@release.register_fake
def _(read: Tensor, after: list[Tensor]) -> Tensor:
    return read.new_empty(0)


def _gather(x: Tensor, slot: int, group_name: str) -> None:
    """Keep the part of the other rank for the receive."""
    group = c10d.group_of_name(group_name)
    gathered = c10d.end(*c10d.functional_gather(x.reshape(1, -1), group))
    part = _GATHERED[group_name, slot] = x.new_zeros(received_size(x.numel()))
    part[: x.numel()] = gathered[1 - group.rank()]


def received_size(num_elements: int) -> int:
    """Elements of what is received for so many; see the end of this module's docstring."""
    return num_elements + num_elements // 8 + 8


def heights(num_rows: int, width: int, num_multiprocessors: int) -> list[int]:
    """Rows of the parts of a product [num_rows, width]: of about two tiles a multiprocessor, and the last less.

    On an H100 such parts of 4680 rows of 5120 take together as long as the whole. What is sent last is beside nothing.
    """
    tiles_beside = -(-width // _TILE_WIDTH)
    fitting = max(1, 2 * num_multiprocessors // tiles_beside) * _TILE_HEIGHT
    height = _rounded_up(num_rows / max(1, round(num_rows / fitting)))
    *found, last = (min(height, num_rows - begin) for begin in range(0, num_rows, height))
    most = min(last, _rounded_up(last * 2 / 3))
    return [*found, most, last - most] if most < last else [*found, last]


def _rounded_up(num_rows: float) -> int:
    return math.ceil(num_rows / _UNIT) * _UNIT


def _computed(a: Tensor, b: Tensor, out: Tensor) -> Iterator[Tensor]:
    """The rows of a @ b in `out`, part by part, as they are queued."""
    num_multiprocessors = torch.cuda.get_device_properties(a.device).multi_processor_count
    sizes = heights(len(out), out.shape[1], num_multiprocessors)
    for rows, part in zip(a.split(sizes), out.split(sizes), strict=True):
        torch.mm(rows, b, out=part)
        yield part


OPS = Pushing(
    start=torch.ops.tpcompile.all_reduce_push_start.default,
    product=torch.ops.tpcompile.all_reduce_push_product.default,
    receive=torch.ops.tpcompile.all_reduce_push_receive.default,
    release=torch.ops.tpcompile.all_reduce_push_release.default,
)


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

    def start(self, x: Tensor, parts: Iterable[Tensor], slot: int, num_slots: int, *, meets: bool) -> None:
        """Queue copies of `x`, in parts that follow each other, each behind all that is on the current stream then."""
        num_bytes = received_size(x.numel()) * x.itemsize
        slot_bytes, memory = self._memory_for(num_bytes, num_slots)
        begin = slot * slot_bytes
        received = memory.own[begin : begin + num_bytes].view(x.dtype)
        stream = torch.cuda.current_stream(self._device)
        last, self._last = self._last, stream
        self._stream.wait_stream(stream)
        is_same = last in (None, stream)
        if not (is_same or is_capturing(self._device)):  # what is captured does not run yet
            self._stream.wait_stream(last)
        if meets:
            with torch.cuda.stream(self._stream):
                memory.meet(channel=0)
        for part in parts:
            self._stream.wait_stream(stream)
            with torch.cuda.stream(self._stream):
                memory.push(part, begin)
            begin += part.numel() * part.itemsize
        with torch.cuda.stream(self._stream):
            memory.meet(channel=1 + slot)
            self._arriving[slot] = self._stream.record_event(), received

    def receive(self, slot: int) -> Tensor:
        """What the peer has sent, once it is there."""
        arrived, received = self._arriving.pop(slot)
        torch.cuda.current_stream(self._device).wait_event(arrived)
        return received

    def _memory_for(self, num_bytes: int, num_slots: int) -> tuple[int, symmetric.PeerMemory]:
        slot_bytes, memory = self._made[-1] if self._made else (0, None)
        if memory is not None and num_bytes <= slot_bytes and memory.own.numel() >= num_slots * slot_bytes:
            return slot_bytes, memory
        check_may_grow(num_bytes, slot_bytes, self._device)
        slot_bytes = max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length(), slot_bytes)
        made = symmetric.PeerMemory(num_slots * slot_bytes, group=self.group, device=self._device)
        self._made.append((slot_bytes, made))
        return slot_bytes, made


def _slots_of(group_name: str, device: torch.device) -> Slots:
    return of_group(OF_GROUPS, group_name, device, Slots)
