"""A torchrun target: as many.py, where Triton kernels are traced as on a GPU, and a launch copies its first argument.

torchrun ... tests/gate/traced.py FOLDER
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.utils._triton
from triton.runtime.jit import JITFunction

from tests.gate import many
from tpcompile.gate import faults


def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """Stands for a launch: the second pointer gets what is at the first."""
    x, y, *_ = {**dict(zip(kernel.arg_names, args, strict=False)), **named}.values()
    y.copy_(x)


def main() -> None:
    """Run the jobs."""
    torch.utils._triton.has_triton = lambda: True  # in a rank's process, which ends here
    JITFunction.run = launched
    for name, fault in faults.ALL.items():
        faults.ALL[name] = dataclasses.replace(fault, needs_gpu=False)
    many.main()


if __name__ == "__main__":
    main()
