"""The block on a single device, in a folder that all programs read; a program's results -> its largest error.

One process computes the block once, as the gate does; every rank of every program loads the same file and takes its
slices. A program with a `reference` of its own computes that in its own processes, as the gate computes a target's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpcompile.bench.contract import Program
from tpcompile.bench.programs import Results
from tpcompile.config import RunConfig
from tpcompile.gate import outputs
from tpcompile.gate.reference import StackReference
from tpcompile.gate.target import on_one_device
from tpcompile.nn.block import BlockInputs
from tpcompile.numerics import error_ratio

_WEIGHTS, _VALUES, _OUTPUT = "weights.pt", "values.pt", "forward"
_COMPARED_LAYER = "layers.0."
"""Gradients of its parameters are compared: the backward pass of every other layer comes before them."""


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
    # Activations of a float64 backward can be larger than a GPU.
    saving = torch.autograd.graph.save_on_cpu() if settings.train and device.type == "cuda" else nullcontext()
    with saving:
        found = StackReference(settings.block, seed=settings.seed, device=device, train=settings.train)

    def kept(run: outputs.Outputs, grads: outputs.Outputs) -> dict[str, Tensor]:
        compared = {name: one for name, one in grads.items() if name == "input" or name.startswith(_COMPARED_LAYER)}
        return {_OUTPUT: run[_OUTPUT].cpu()} | {f"grad {name}": one.cpu() for name, one in compared.items()}

    values = {
        "inputs": [one if one is None else one.cpu() for one in found.given],
        "cotangent": found.cotangents()[_OUTPUT].cpu() if settings.train else None,
        "single": kept(found.single.outputs, found.single.grads),
        "exact": kept(found.exact.outputs, found.exact.grads),
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
    single: Mapping[str, Tensor]
    """The output, and gradients as `grad NAME`, in the dtype of the block; on the device when asked for."""
    exact: Mapping[str, Tensor]
    """The same in float64."""

    @classmethod
    def read(cls, folder: Path, device: torch.device) -> Given:
        """Read the files of `write`, on every rank of every program."""
        weights, values = (
            torch.load(folder / name, mmap=True, map_location="cpu", weights_only=True) for name in (_WEIGHTS, _VALUES)
        )
        cotangent = values["cotangent"]
        return cls(
            weights=OnDevice(weights, device),
            inputs=BlockInputs(*(one if one is None else one.to(device) for one in values["inputs"])),
            cotangent=None if cotangent is None else cotangent.to(device),
            single=OnDevice(values["single"], device),
            exact=OnDevice(values["exact"], device),
        )


class Expected:
    """What the results of a program are compared with: its own reference, else the preset's block."""

    def __init__(self, program: Program, block: Given) -> None:
        self._program = program
        self._single, self._exact = block.single, block.exact
        self.key = ""
        """Equal for programs of one model, between which ratios are taken; empty for the preset's block."""
        if program.reference is not None:
            self._single, self._exact = on_one_device(program)
            self.key = " ".join(f"{norm:.6g}" for norm in outputs.norms(self._exact))

    def error(self, got: Results) -> tuple[float, str]:
        """The largest error as a multiple of the single-device error, and the tensor that has it."""
        kept = outputs.kept(got.output)
        if self.key:
            errors = outputs.errors(kept, kept, self._single, self._exact)
            return _worst({name: one["ratio"] for name, one in errors.items() if not name.startswith("eager ")})
        output, exact = kept.get(_OUTPUT), self._exact[_OUTPUT]
        shape = () if output is None else tuple(output.shape)
        is_block = shape == exact.shape
        if not is_block:
            return math.inf, f"{_OUTPUT}, of shape {shape}: a model that is not the preset's block needs a reference"
        ratios = {_OUTPUT: _ratio(output, self._single[_OUTPUT], exact)}
        return _worst(ratios | self._of_gradients(got.grads or {}))

    def _of_gradients(self, got: Mapping[str, Tensor | None]) -> dict[str, float]:
        """Gradient -> its error ratio: the input, and this rank's slices of the first layer's parameters."""
        if not got:
            return {}
        ratios = {"grad input": _ratio(got["input"], self._single["grad input"], self._exact["grad input"])}
        singles, exacts = self._renamed(self._single), self._renamed(self._exact)
        for name, exact in exacts.items():
            own_exact = self._program.slice_of(name, exact)
            own_single = self._program.slice_of(name, singles[name])
            if own_exact is None or own_single is None:
                continue
            whole = error_ratio.relative(singles[name], exact)
            ratios[f"grad {name}"] = _ratio(got.get(name), own_single, own_exact, whole=whole)
        return ratios

    def _renamed(self, block: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The gradients of the first layer by the parameters of the program."""
        grads = {name: one for name, one in block.items() if name.startswith(f"grad {_COMPARED_LAYER}")}
        return self._program.renamed({name.removeprefix("grad "): one for name, one in grads.items()})


def _worst(ratios: Mapping[str, float]) -> tuple[float, str]:
    """Infinite for a ratio that is no number."""
    finite = {name: ratio if math.isfinite(ratio) else math.inf for name, ratio in ratios.items()}
    worst = max(finite, key=lambda name: finite[name])
    return finite[worst], worst


def _ratio(value: Tensor | None, single: Tensor, exact: Tensor, *, whole: float = 0.0) -> float:
    """Infinite for a tensor that is missing or of a different shape."""
    if isinstance(value, DTensor):
        value = value.full_tensor()  # a collective, which all ranks call alike
    if value is None or value.shape != exact.shape:
        return math.inf
    return error_ratio.error_of(value, single, exact, whole=whole)["ratio"]
