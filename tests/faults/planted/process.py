"""Processes that die, stop, raise, end early or never arrive; what they compile is the same on all ranks."""

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

from tests.faults import backends
from tests.faults.case import fault, healthy
from tests.faults.context import Context
from tpcompile.evidence.records.causes import Cause

# B batch, D features; all tensors are plain local ones.

_LAYER = "# blamed: the layer"
_GARBAGE = "unslothai/unsloth-zoo#967: one rank fails, watchdog abort on the others in all of 4 scenarios"
_SKEW = "pytorch#108971: NCCL timeouts, some ranks arrive 17 to 30 minutes later"
_UNLOGGED = "pytorch#140395: a rank hangs, and what it did is not logged"

_FOR_EVER_S = 3600.0
_HEADROOM_BYTES = 256 * 2**20


def _layer(context: Context, *, backend: Any = None) -> Callable[[Tensor], Tensor]:
    w_DD, group = context.randn(16, 16), context.group

    def layer(x_BD: Tensor) -> Tensor:  # blamed: the layer
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1  # blamed: the layer

    return torch.compile(layer, backend=backend or context.backend, dynamic=False)


@fault(Cause.KILLED, _GARBAGE, ranks=(0,), step=3)
def killed(context: Context) -> None:
    """Rank 0 is killed at step 3."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            os.kill(os.getpid(), signal.SIGKILL)
        layer(context.randn(8, 16))


@fault(Cause.STOPPED_RESPONDING, _UNLOGGED, ranks=(0,), step=3, options={"stopped_s": 4.0})
def stopped(context: Context) -> None:
    """Rank 0 is stopped (SIGSTOP) at step 3 and never continued."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            os.kill(os.getpid(), signal.SIGSTOP)
        layer(context.randn(8, 16))


def _strikes(context: Context, strike: Callable[[], None], *, num_before: int) -> Callable[..., Any]:
    """A backend that calls `strike` on one rank after it has compiled `num_before` graphs there."""
    compiles: Iterator[int] = iter(range(context.num_steps))

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        if next(compiles) == num_before and context.diverges:
            context.reached_fault()
            strike()
        return backends.aot_eager(module, inputs)

    return backend


@fault(Cause.KILLED, "pytorch#130935: jobs time out while some ranks compile")
def killed_compiling(context: Context) -> None:
    """Rank 1 is killed while it compiles for the first time."""
    layer = _layer(context, backend=_strikes(context, lambda: os.kill(os.getpid(), signal.SIGKILL), num_before=0))
    for _ in range(context.num_steps):
        layer(context.randn(8, 16))


@fault(Cause.STOPPED_RESPONDING, _UNLOGGED, options={"stopped_s": 4.0})
def stopped_compiling(context: Context) -> None:
    """Rank 1 is stopped (SIGSTOP) while it compiles for the first time."""
    layer = _layer(context, backend=_strikes(context, lambda: os.kill(os.getpid(), signal.SIGSTOP), num_before=0))
    for _ in range(context.num_steps):
        layer(context.randn(8, 16))


@fault(
    Cause.COMPILE_FAILED,
    _GARBAGE,
    "triton#2688, pytorch#134384: FileNotFoundError while compiling on random ranks",
    marker=_LAYER,
    step=4,
)
def disk_full_compiling(context: Context) -> None:
    """All ranks recompile at step 4, and the backend of rank 1 raises: its disk is full."""

    def strike() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    layer = _layer(context, backend=_strikes(context, strike, num_before=1))
    for step in range(context.num_steps):
        layer(context.randn(8 if step < context.num_steps - 1 else 4, 16))


@fault(Cause.RAISED, _GARBAGE, marker="# fault: raised", step=3)
def raised(context: Context) -> None:
    """Rank 1 raises between two calls, at step 3."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            raise ValueError("record 4711 has no label")  # fault: raised
        layer(context.randn(8, 16))


@fault(Cause.RAISED, _GARBAGE, marker="# fault: storage", step=3)
def raised_connection(context: Context) -> None:
    """Rank 1 raises ConnectionResetError at step 3, from the storage of its data."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")  # fault: storage
        layer(context.randn(8, 16))


@fault(
    Cause.CALL_COUNT,
    "pytorch#75373: ranks that execute different modules hang or compute wrong results",
    marker="# blamed: the call that one rank does not make",
    step=3,
)
def left_early(context: Context) -> None:
    """Rank 1 leaves its loop at step 3, the other ranks continue."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            break
        layer(context.randn(8, 16))  # blamed: the call that one rank does not make


@fault(Cause.RAISED, _GARBAGE, marker="# fault: out of memory", step=3)
def out_of_memory(context: Context) -> None:
    """An allocation of rank 1 fails at step 3."""
    layer = _layer(context)
    kept = []
    for step in range(context.num_steps):
        if context.faulty(step):
            _limit_memory()
        kept.append(torch.empty(2 * _HEADROOM_BYTES, dtype=torch.uint8))  # fault: out of memory
        layer(context.randn(8, 16))


def _limit_memory() -> None:
    """Limit the address space of this process to little more than it uses now."""
    with open("/proc/self/statm") as file:
        now_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + _HEADROOM_BYTES, resource.RLIM_INFINITY))


@fault(
    Cause.NEVER_ARRIVED,
    _SKEW,
    _UNLOGGED,
    name="never_comes_back",
    what="Rank 1 waits forever for its data at step 3; skew_limit_s is 6 s.",
    marker="# fault: data never comes",
    step=3,
    options={"skew_limit_s": 6.0},
)
@fault(Cause.NEVER_ARRIVED, _SKEW, _UNLOGGED, marker="# fault: data never comes", options={"skew_limit_s": 6.0})
def never_arrives(context: Context) -> None:
    """Rank 1 waits forever for its first batch; skew_limit_s is 6 s."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            time.sleep(_FOR_EVER_S)  # fault: data never comes
        layer(context.randn(8, 16))


@healthy(_SKEW, "karpathy/nanochat#722: watchdog kill at start, one node is ready long before the other")
def slow_first_batch(context: Context) -> None:
    """Healthy: rank 1 makes its first call 9 s later."""
    layer = _layer(context)
    if context.rank == 1:
        time.sleep(9)
    for _ in range(context.num_steps):
        layer(context.randn(8, 16))
