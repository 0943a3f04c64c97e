"""Triton's interpreter, made to round as GPUs do: seen on Triton 3.6.0 and 3.9.0.

Its conversion of float32 to bfloat16 truncates, which doubles the error of a kernel; GPUs round to nearest even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as _interpreter

_convert = _interpreter._convert_float


def like_gpus() -> None:
    """From here on, in this process: float32 rounded to bfloat16 as on GPUs, and no warnings of NaN and overflow."""
    np.seterr(all="ignore")
    _interpreter._convert_float = _rounded


def _rounded(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert(data, source, target, rounding_mode)
    rounded = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.uint16).numpy().reshape(data.shape)
