"""The block on a single device, in a folder that all programs read; a program's results -> its largest error.

One process computes the block once; every rank of every program loads the same file and takes its slices. A program
with a `reference` of its own computes that in its own processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpcompile.bench.contract import Program
from tpcompile.bench.step import Results
from tpcompile.config import RunConfig
from tpcompile.gate import outputs
from tpcompile.gate.target import on_one_device
from tpcompile.nn.block import BlockInputs, TransformerStack
from tpcompile.numerics import error_ratio
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights
from tpcompile.numerics.single_device import Reference

_WEIGHTS, _VALUES = "weights.pt", "values.pt"
_COMPARED_LAYER = "layers.0."
"""Gradients of its parameters are compared: the backward pass of every other layer comes before them."""
_OUTPUT, _INPUT_GRAD = "forward", "grad input"
Error = tuple[float, str]
"""The largest error as a multiple of the single-device error, and the tensor that has it."""


@dataclass(frozen=True)
class Expected:
    """One tensor on a single device."""

    single: Tensor
    """The tensor in the dtype of the block."""
    exact: Tensor
    """The same in float64."""
    whole: float
    """The error of the single device on the whole tensor."""


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
    """Draw weights and inputs, run the block in its dtype and in float64, and keep all of it in the folder."""
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
        if name == "input" or name.startswith(_COMPARED_LAYER):
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
    """The content of the folder: what programs are built from, and what their results are compared with."""

    weights: Mapping[str, Tensor]
    """Full tensors, on the device when asked for."""
    inputs: BlockInputs
    cotangent: Tensor | None
    expected: Mapping[str, Expected]
    key = ""
    """Ratios are taken between programs of one key."""

    @classmethod
    def read(cls, folder: Path, device: torch.device) -> Given:
        """Read the files of `write`, on every rank of every program."""
        weights, values = (
            torch.load(folder / name, mmap=True, map_location="cpu", weights_only=True) for name in (_WEIGHTS, _VALUES)
        )
        cotangent, wholes = values["cotangent"], values["whole"]
        return cls(
            weights=OnDevice(weights, device),
            inputs=BlockInputs(*(one if one is None else one.to(device) for one in values["inputs"])),
            cotangent=None if cotangent is None else cotangent.to(device),
            expected={
                name: Expected(single, exact, wholes[name]) for name, (single, exact) in values["expected"].items()
            },
        )

    def error(self, got: Results, program: Program) -> Error:
        """The error of the output, and of the gradients that a training step gave."""
        output = next(iter(error_ratio.named_tensors(got.output, _OUTPUT).values()), None)
        shape = () if output is None else tuple(output.shape)
        if shape != self.expected[_OUTPUT].exact.shape:
            return math.inf, f"{_OUTPUT}, of shape {shape}: a model that is not the preset's block needs a reference"
        ratios = {_OUTPUT: _ratio(output, self.expected[_OUTPUT])}
        if got.input_grad is not None:
            ratios[_INPUT_GRAD] = _ratio(got.input_grad, self.expected[_INPUT_GRAD])
        if got.grads is not None:
            ratios |= self._of_gradients(got.grads, program)
        return _worst(ratios)

    def _of_gradients(self, got: Mapping[str, Tensor | None], program: Program) -> dict[str, float]:
        grads = {name.removeprefix("grad "): one for name, one in self.expected.items() if _COMPARED_LAYER in name}
        # As tensors of equal length, so that parts of a packed weight get the error of the whole one.
        wholes = program.renamed({name: torch.full((len(one.exact),), one.whole) for name, one in grads.items()})
        singles = program.renamed({name: one.single for name, one in grads.items()})
        exacts = program.renamed({name: one.exact for name, one in grads.items()})
        ratios = {}
        for name, exact in exacts.items():
            own_exact = program.slice_of(name, exact)
            own_single = program.slice_of(name, singles[name])
            if own_exact is None or own_single is None:
                continue
            whole = float(wholes[name][0])
            ratios[f"grad {name}"] = _ratio(got.get(name), Expected(own_single, own_exact, whole))
        return ratios


class OwnReference:
    """What the `reference` of a program returns on one device, for a model that is not the preset's block."""

    def __init__(self, program: Program) -> None:
        self._single, self._exact = on_one_device(program)
        norms = outputs.norms(self._exact)
        self.key = " ".join(f"{norm:.6g}" for norm in norms)  # equal for equal models, weights and inputs

    def error(self, got: Results, program: Program) -> Error:
        """The error of all floating tensors that the program or its step returned."""
        kept = outputs.kept(got.output)
        errors = outputs.errors(kept, kept, self._single, self._exact)
        return _worst({name: one["ratio"] for name, one in errors.items() if not name.startswith("eager ")})


def _worst(ratios: Mapping[str, float]) -> Error:
    wrong = [name for name, ratio in ratios.items() if not math.isfinite(ratio)]
    worst = wrong[0] if wrong else max(ratios, key=lambda name: ratios[name])
    return math.inf if wrong else ratios[worst], worst


def _ratio(value: Tensor | None, expected: Expected) -> float:
    """Infinite for a tensor that is missing or of a different shape."""
    if isinstance(value, DTensor):
        value = value.full_tensor()  # a collective, which all ranks call alike
    if value is None or value.shape != expected.exact.shape:
        return math.inf
    single = expected.single.to(value.device)
    exact = expected.exact.to(value.device)
    return error_ratio.error_of(value, single, exact, whole=expected.whole)["ratio"]
