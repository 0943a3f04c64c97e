"""Triton's interpreter, made to round as GPUs do: seen on Triton 3.6.0 and 3.9.0.

Its conversion of float32 to bfloat16 truncates, which doubles the error of a kernel; GPUs round to nearest even. It
takes any number of warps. Its loads and atomics of 8 aligned bytes are single accesses of memory, so that processes
which share it can exchange words.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as _interpreter

_convert = _interpreter._convert_float
_run = _interpreter.InterpretedFunction.run
_masked_load = _interpreter.InterpreterBuilder.create_masked_load
_POLL_S = 5e-4
_NUM_WARPS = (1, 2, 4, 8, 16, 32)


def like_gpus() -> None:
    """From here on, in this process: float32 rounded to bfloat16 as on GPUs, and no warnings of NaN and overflow.

    A launch with a number of warps that no GPU takes raises ValueError.
    """
    np.seterr(all="ignore")
    _interpreter._convert_float = _rounded
    _interpreter.InterpretedFunction.run = _run_with_warps


def patient() -> None:
    """From here on, in this process: a volatile load waits, so that polls leave the cores to other ranks."""
    _interpreter.InterpreterBuilder.create_masked_load = _patient_load


def _patient_load(*given: Any) -> Any:
    is_volatile = given[-1]
    if is_volatile:
        time.sleep(_POLL_S)
    return _masked_load(*given)


def _run_with_warps(self: Any, *args: Any, **kwargs: Any) -> Any:
    num_warps = kwargs.get("num_warps", _NUM_WARPS[0])
    if num_warps not in _NUM_WARPS:
        raise ValueError(f"num_warps={num_warps}; a GPU takes {', '.join(map(str, _NUM_WARPS))}")
    return _run(self, *args, **kwargs)


def _rounded(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert(data, source, target, rounding_mode)
    rounded = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.uint16).numpy().reshape(data.shape)
