"""What the parts of scripts/gpu_fastpath_short.py share: sizes, data, and a report on disk.

With --dry, sizes are tiny, and kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

OUT = Path(os.environ["OUT"])
DEVICE, WIDTH, SIZE = ("cpu", 64, 16) if DRY else ("cuda", 5120, 128)
EPS = 1e-6


class Report:
    """Name of a step -> what it found; on disk after each."""

    def __init__(self, part: str) -> None:
        self.file = OUT / f"{part}.json"
        self.found: dict[str, Any] = {}

    def add(self, name: str, **found: Any) -> None:
        self.found[name] = found
        self.file.write_text(json.dumps(self.found, indent=1, default=str) + "\n")

    def run(self, name: str, step: Callable[[], dict[str, Any]]) -> None:
        """A step that fails is reported, and the next one runs."""
        started = time.monotonic()
        try:
            found = step()
        except Exception as error:  # reported, and the next step runs
            found = {"FAILED": f"{type(error).__name__}: {error}"[:400]}
        self.add(name, **found, seconds=round(time.monotonic() - started, 1))


def in_float64(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if hasattr(value, "double") else value for name, value in arguments.items()}


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def weight(size: int) -> Tensor:
    return torch.linspace(0.5, 2, size).to(DEVICE, torch.bfloat16)


def rotary(rows: int, **widths: int) -> dict[str, Any]:
    angles = torch.randn(rows, SIZE // 2, device=DEVICE)
    weights = {"q_weight_d": weight(WIDTH), "k_weight_c": weight(SIZE)}
    activations = {name: randn(1, rows, width) for name, width in widths.items()}
    return {**activations, **weights, "cos_SR": angles.cos(), "sin_SR": angles.sin(), "eps": EPS}
