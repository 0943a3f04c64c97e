"""The gate's block configuration -> the single-device reference of its stacks; see `tpcompile.numerics`."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import Collectives, TpComm
from tpcompile.config import BlockConfig
from tpcompile.evidence.records import WrongOp
from tpcompile.nn.block import BlockInputs, TransformerStack
from tpcompile.nn.fast_paths import use_plain_code
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights
from tpcompile.numerics.error_ratio import cast
from tpcompile.numerics.localise import first_wrong, module_outputs
from tpcompile.numerics.single_device import Reference, Result, run_once
from tpcompile.numerics.wrong_op import wrong_op

__all__ = ["Result", "StackReference", "build", "call_once", "free"]

ACTIVATIONS = ("input", "input.modulation_B6D", "input.context")
"""Inputs of a block that get a gradient; tables, masks and seeds get none."""


def build(config: BlockConfig, comm: TpComm, full: Mapping[str, Tensor], device: torch.device) -> TransformerStack:
    """A stack on `device` that holds this rank's slices of `full`."""
    with torch.device("meta"):
        stack = TransformerStack(config, comm, num_layers=config.num_layers)
    stack = stack.to_empty(device=device)
    load_full_state_dict(stack, full)
    return stack


class StackReference(Reference):
    """The single-device reference of a stack, in float64 and in the dtype under test, on the same numbers."""

    def __init__(self, config: BlockConfig, *, seed: int, device: torch.device, train: bool) -> None:
        self.config = config
        dtype: torch.dtype = getattr(torch, config.dtype)
        optional = {"input.modulation_B6D": config.modulation, "input.context": config.cross_attention}

        def stack(comm: TpComm) -> nn.Module:
            with torch.device("meta"):
                return TransformerStack(config, comm, num_layers=config.num_layers)

        super().__init__(
            stack,
            lambda asked: draw_inputs(config, seed=seed + 1, device=device, dtype=asked, seq_len=config.seq_len),
            dtype=dtype,
            device=device,
            seed=seed,
            train=train,
            weights=draw_stack_weights(config, seed=seed, dtype=dtype, device=device),
            differentiate=[name for name in ACTIVATIONS if optional.get(name, True)],
        )

    def inputs(self, seq_len: int | None = None) -> BlockInputs:
        """Arguments of a stack, equal on all ranks."""
        tokens = seq_len or self.config.seq_len
        return draw_inputs(self.config, seed=self.seed + 1, device=self.device, dtype=self.dtype, seq_len=tokens)

    def first_wrong(self, stack: nn.Module, comm: TpComm, *, limit: float) -> tuple[str, WrongOp | None]:
        """The first module of a wrong stack that is wrong, run in eager, and the op that it begins with.

        All ranks must call it. Empty and None for a stack that is right.
        """
        partial = {f"{name}.attention" for name, block in stack.named_modules() if getattr(block, "exchange", None)}
        got = {name: found for name, found in module_outputs(stack, self.inputs()).items() if name not in partial}
        references = self._single_devices()
        single, exact = (module_outputs(*reference) for reference in references)
        name = first_wrong(got, single, exact, rank=comm.rank, limit=limit)
        as_fast_paths = self._single_devices()
        for module, _inputs in as_fast_paths:
            use_plain_code(module)  # whose values are those of fast paths, such as both sums of q and k together
        references += as_fast_paths
        return name, wrong_op(stack, self.inputs(), references, name, comm, dtype=self.dtype)

    def _single_devices(self) -> list[tuple[nn.Module, BlockInputs]]:
        """Modules and their inputs, in the dtype under test and in float64."""
        exactly = cast(self.inputs(), torch.float64)
        return [(self.single_device(self.dtype), self.inputs()), (self.single_device(torch.float64), exactly)]


def free(device: torch.device) -> None:
    """Free the memory of models that are no longer used, so that the next mode can use it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def call_once(reference: StackReference, program: object, stack: nn.Module, inputs: BlockInputs) -> Result:
    """One call on given inputs, with a backward pass when the reference trains; what the gate times."""
    cotangents = reference.cotangents(Collectives(None)) if reference.train else None
    return run_once(program, stack, inputs, cotangents, reference.differentiated)
