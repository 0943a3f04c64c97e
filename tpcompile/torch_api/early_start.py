"""Kernel launch while a CUDA graph is captured -> it may start when all programs of the kernel before it have started.

The kernel must wait itself (`griddepcontrol.wait`) before it reads what the kernel before it writes, and before it
writes. The kernel before it needs no change. Functions of the CUDA driver since 12.3, seen on 13.0:

    cuStreamGetCaptureInfo_v3                what the next kernel of a capturing stream depends on
    cuGraphNodeGetType                       whether that is a kernel
    cuStreamUpdateCaptureDependencies_v2     the next kernel depends on its start, not on its end

Without them, outside of a capture, and where what comes before is not one kernel, the launch is an ordinary one.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_CAPTURING, _KERNEL_NODE, _SET = 1, 0, 1
_PROGRAMMATIC, _ALL_STARTED = 1, 2


class _Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )  # fmt: skip


def let_start_early(kernel: Any) -> None:
    """From here on in this process, every captured launch of this Triton kernel starts early."""
    if _start_next_early not in kernel.pre_run_hooks:
        kernel.add_pre_run_hook(_start_next_early)


def _start_next_early(*_: Any, **__: Any) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        start_next_early(torch.cuda.current_stream().cuda_stream)


def start_next_early(stream: int) -> bool:
    """True when the next kernel of a capturing stream starts when all programs of the one before it have started."""
    driver = _driver()
    status, count, kind = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int()
    number, graph = ctypes.c_uint64(), ctypes.c_void_p()
    nodes, edges = ctypes.POINTER(ctypes.c_void_p)(), ctypes.POINTER(_Edge)()
    if driver is None:
        return False
    found = [ctypes.byref(one) for one in (status, number, graph, nodes, edges, count)]
    failed = driver.cuStreamGetCaptureInfo_v3(ctypes.c_void_p(stream), *found)
    if failed or status.value != _CAPTURING or count.value != 1:
        return False
    driver.cuGraphNodeGetType(ctypes.c_void_p(nodes[0]), ctypes.byref(kind))
    if kind.value != _KERNEL_NODE:
        return False
    before = (ctypes.c_void_p * 1)(nodes[0])
    started = (_Edge * 1)(_Edge(from_port=_ALL_STARTED, type=_PROGRAMMATIC))
    one, flags = ctypes.c_size_t(1), ctypes.c_uint(_SET)
    update = driver.cuStreamUpdateCaptureDependencies_v2
    return update(ctypes.c_void_p(stream), before, started, one, flags) == 0


@functools.cache
def _driver() -> Any:
    """The CUDA driver; None where it has not these functions."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    has_all = hasattr(driver, "cuStreamGetCaptureInfo_v3") and hasattr(driver, "cuStreamUpdateCaptureDependencies_v2")
    return driver if has_all else None
