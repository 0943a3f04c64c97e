"""Processes that die, stop, raise, leave or never come; what they compile is the same on all ranks."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tpcompile.faults.context import Context
from tpcompile.torch_api import backends

# B batch, D features; all tensors are plain local ones.

_FOR_EVER_S = 3600.0
_HEADROOM_BYTES = 256 * 2**20


def _layer(context: Context, *, backend: Any = None) -> Callable[[Tensor], Tensor]:
    w_DD, group = context.randn(16, 16), context.group

    def layer(x_BD: Tensor) -> Tensor:  # blamed: the layer
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1  # blamed: the layer

    return torch.compile(layer, backend=backend or context.backend, dynamic=False)


def killed(context: Context) -> None:
    """The out-of-memory killer of the kernel takes one rank."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            os.kill(os.getpid(), signal.SIGKILL)
        layer(context.randn(8, 16))


def stopped(context: Context) -> None:
    """One rank is stopped and never continued: a debugger, a batch system that suspends."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            os.kill(os.getpid(), signal.SIGSTOP)
        layer(context.randn(8, 16))


def _strikes(context: Context, strike: Callable[[], None], *, num_before: int) -> Callable[..., Any]:
    """A backend in which something happens to one rank, after it has compiled so many graphs."""
    compiles: Iterator[int] = iter(range(context.num_steps))

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if next(compiles) == num_before and context.diverges:
            context.reached_fault()
            strike()
        return backends.aot_eager(module, inputs)

    return backend


def killed_compiling(context: Context) -> None:
    """One rank is killed while it compiles for the first time."""
    layer = _layer(context, backend=_strikes(context, lambda: os.kill(os.getpid(), signal.SIGKILL), num_before=0))
    for _ in range(context.num_steps):
        layer(context.randn(8, 16))


def stopped_compiling(context: Context) -> None:
    """One rank is stopped while it compiles for the first time."""
    layer = _layer(context, backend=_strikes(context, lambda: os.kill(os.getpid(), signal.SIGSTOP), num_before=0))
    for _ in range(context.num_steps):
        layer(context.randn(8, 16))


def disk_full_compiling(context: Context) -> None:
    """All ranks recompile for a shorter last batch, and the disk of one is full."""

    def strike() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    layer = _layer(context, backend=_strikes(context, strike, num_before=1))
    for step in range(context.num_steps):
        layer(context.randn(8 if step < context.num_steps - 1 else 4, 16))


def raised(context: Context) -> None:
    """One rank finds a bad record between two calls."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            raise ValueError("record 4711 has no label")  # fault: raised
        layer(context.randn(8, 16))


def raised_connection(context: Context) -> None:
    """One rank loses its connection to the storage of the data: no fault of the communication between ranks."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")  # fault: storage
        layer(context.randn(8, 16))


def left_early(context: Context) -> None:
    """The data loader of one rank ends before the others' do."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            break
        layer(context.randn(8, 16))  # blamed: the call that one rank does not make


def out_of_memory(context: Context) -> None:
    """A cache that grows: one rank has less memory, and torch's allocator raises there."""
    layer, kept = _layer(context), []
    for step in range(context.num_steps):
        if context.faulty(step):
            _limit_memory()
        kept.append(torch.empty(2 * _HEADROOM_BYTES, dtype=torch.uint8))  # fault: out of memory
        layer(context.randn(8, 16))


def _limit_memory() -> None:
    """Leave this process a little more address space than it has."""
    with open("/proc/self/statm") as file:
        now_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + _HEADROOM_BYTES, resource.RLIM_INFINITY))


def never_arrives(context: Context) -> None:
    """The data of one rank never comes, before its first call or at a later step."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            time.sleep(_FOR_EVER_S)  # fault: data never comes
        layer(context.randn(8, 16))


def slow_first_batch(context: Context) -> None:
    """Healthy: one rank takes long to load its first batch, while the other has compiled and waits."""
    layer = _layer(context)
    if context.rank == 1:
        time.sleep(9)
    for _ in range(context.num_steps):
        layer(context.randn(8, 16))
