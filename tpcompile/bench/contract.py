"""The contract of a program: a function of a BenchContext that returns a `tpcompile.Target`, or (program, inputs)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.config import RunConfig
from tpcompile.nn.block import BlockInputs
from tpcompile.target import Target, TargetContext


@dataclass(frozen=True, kw_only=True)
class BenchContext(TargetContext):
    """The argument of FUNCTION in `--program FILE:FUNCTION`; `settings` are the sizes of the preset's block by name."""

    config: RunConfig
    """The preset: its block, whether it is trained, how it is compiled."""
    weights: Mapping[str, Tensor]
    """Full tensors of the block that ships, each moved to the device when it is asked for."""
    inputs: BlockInputs
    """Arguments of the block, equal on all ranks."""
    cotangent: Tensor | None
    """The gradient of the output that the backward pass starts from; None without `--train`."""

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks."""
        return self.mesh.get_group()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return getattr(torch, self.config.block.dtype)


@dataclass(frozen=True, kw_only=True)
class Program(Target):
    """A Target that computes the preset's block with its weights, and what only a benchmark asks of it."""

    renamed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda tensors: tensors
    """Tensors of the block that ships, by name -> those of the program, which may have its packed weights apart."""
    slice_of: Callable[[str, Tensor], Tensor | None] = lambda name, full: None
    """A parameter and its full gradient -> this rank's part; None, the default, for one that is not compared."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around every call."""
    check: Callable[[], None] | None = None
    """Called after the calls; raises for an error that only the host can see."""
    notes: tuple[str, ...] = ()
    """Printed below the table."""
