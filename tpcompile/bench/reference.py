"""Block configuration -> a folder with full weights, inputs and single-device results; a program's results -> errors.

One process computes them once; every program of every rank loads the same file, and takes its slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpcompile.bench.step import Results
from tpcompile.config import RunConfig
from tpcompile.nn.block import BlockInputs, TransformerStack
from tpcompile.numerics import error_ratio
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights
from tpcompile.numerics.single_device import Reference

_WEIGHTS, _VALUES = "weights.pt", "values.pt"
COMPARED_LAYER = "layers.0."
"""Gradients of its parameters are compared: the backward pass of every other layer comes before them."""
SliceOf = Callable[[str, Tensor], Tensor | None]
"""A parameter of the program and its full gradient -> this rank's part; None for one that is not compared."""
Renamed = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Tensors of our stack by name -> those of the program, which may have packed weights apart."""
_OUTPUT, _INPUT_GRAD = "forward", "grad input"


@dataclass(frozen=True)
class Expected:
    """One tensor on a single device."""

    single: Tensor
    """In the dtype of the block."""
    exact: Tensor
    """In float64."""
    whole: float
    """Error of the single device."""


class OnDevice(Mapping[str, Tensor]):
    """Full tensors of a file, each moved to the device when it is asked for: a rank needs a slice of one at a time."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def write(settings: RunConfig, folder: Path, device: torch.device) -> None:
    """Draw weights and inputs, run the single device in the block's dtype and in float64, and keep all of it."""
    block, dtype = settings.block, getattr(torch, settings.block.dtype)

    def stack(comm: Any) -> TransformerStack:
        with torch.device("meta"):
            return TransformerStack(block, comm, num_layers=block.num_layers)

    # Activations of a float64 backward can be larger than a GPU.
    saving = torch.autograd.graph.save_on_cpu() if settings.train and device.type == "cuda" else nullcontext()
    with saving:
        found = Reference(
            stack,
            lambda asked: draw_inputs(block, seed=settings.seed + 1, device=device, dtype=asked, seq_len=block.seq_len),
            dtype=dtype,
            device=device,
            seed=settings.seed,
            train=settings.train,
            weights=draw_stack_weights(block, seed=settings.seed, dtype=dtype, device=device),
            differentiate=["input"],
        )
    kept = {_OUTPUT: (found.single.output, found.exact.output)}
    for name, exact in found.exact.grads.items():
        if name == "input" or name.startswith(COMPARED_LAYER):
            kept[f"grad {name}"] = (found.single.grads[name], exact)
    values = {
        "inputs": [one if one is None else one.cpu() for one in found.given],
        "cotangent": found.cotangents()[_OUTPUT].cpu() if settings.train else None,
        "expected": {name: [one.cpu() for one in pair] for name, pair in kept.items()},
        "whole": {name: error_ratio.relative(single, exact) for name, (single, exact) in kept.items()},
    }
    torch.save({name: one.cpu() for name, one in found.full.items()}, folder / _WEIGHTS)
    torch.save(values, folder / _VALUES)


@dataclass(frozen=True)
class Given:
    """What a program is built from, and what its results are compared with."""

    weights: Mapping[str, Tensor]
    """Full tensors, on the device when asked for."""
    inputs: BlockInputs
    cotangent: Tensor | None
    expected: Mapping[str, Expected]

    @classmethod
    def read(cls, folder: Path, device: torch.device) -> Given:
        """What `write` kept."""
        weights, values = (
            torch.load(folder / name, mmap=True, map_location="cpu", weights_only=True) for name in (_WEIGHTS, _VALUES)
        )
        cotangent = values["cotangent"]
        return cls(
            weights=OnDevice(weights, device),
            inputs=BlockInputs(*(one if one is None else one.to(device) for one in values["inputs"])),
            cotangent=None if cotangent is None else cotangent.to(device),
            expected={
                name: Expected(single, exact, values["whole"][name])
                for name, (single, exact) in values["expected"].items()
            },
        )

    def error(self, got: Results, slice_of: SliceOf, renamed: Renamed) -> tuple[float, str]:
        """Largest error as a multiple of the single-device error, and the tensor that has it."""
        ratios = {_OUTPUT: _ratio(got.output, self.expected[_OUTPUT])}
        if got.input_grad is not None:
            ratios[_INPUT_GRAD] = _ratio(got.input_grad, self.expected[_INPUT_GRAD])
        if got.grads is not None:
            ratios |= self._of_gradients(got.grads, slice_of, renamed)
        wrong = [name for name, ratio in ratios.items() if not math.isfinite(ratio)]
        worst = wrong[0] if wrong else max(ratios, key=lambda name: ratios[name])
        return math.inf if wrong else ratios[worst], worst

    def _of_gradients(self, got: Mapping[str, Tensor | None], slice_of: SliceOf, renamed: Renamed) -> dict[str, float]:
        grads = {name.removeprefix("grad "): one for name, one in self.expected.items() if COMPARED_LAYER in name}
        # As tensors of equal length, so that parts of a packed weight get the error of the whole one.
        wholes = renamed({name: torch.full((len(one.exact),), one.whole) for name, one in grads.items()})
        singles = renamed({name: one.single for name, one in grads.items()})
        exacts = renamed({name: one.exact for name, one in grads.items()})
        ratios = {}
        for name, exact in exacts.items():
            mine, single = slice_of(name, exact), slice_of(name, singles[name])
            if mine is not None and single is not None:
                expected = Expected(single, mine, float(wholes[name][0]))
                ratios[f"grad {name}"] = _ratio(got.get(name), expected)
        return ratios


def _ratio(value: Tensor | None, expected: Expected) -> float:
    if value is None:
        return math.inf
    single, exact = (one.to(value.device) for one in (expected.single, expected.exact))
    if value.shape != exact.shape:
        return math.inf
    return error_ratio.error_of(value, single, exact, whole=expected.whole)["ratio"]
