"""torch 2.11 to 2.13: Inductor drops the `alpha` of `torch.add` where what is added, or added to, is a matrix product.

    python repro/inductor_add_alpha.py

The pass that makes one `addmm` of both does not look at it: a compiled LoRA layer, `torch.add(y, h @ b, alpha=scale)`,
is scaled by 1, silently, and alike on all ranks. With `y + scale * (h @ b)` it is right. Near pytorch#167313, which is
the same of `addmm`. Exit status 0 when it is wrong so, 1 when it is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor


def added(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A product is added."""
    return torch.add(y, a @ b, alpha=4.0)


def added_to(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """It is added to a product."""
    return torch.add(a @ b, y, alpha=4.0)


def written_out(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Without `alpha`."""
    return y + 4.0 * (a @ b)


def error(function: Callable[..., Tensor], backend: str = "inductor") -> float:
    """The largest difference of compiled code to eager, for 8 x 8 matrices."""
    torch.manual_seed(0)
    given = [torch.randn(8, 8) for _ in range(3)]
    torch.compiler.reset()
    return (torch.compile(function, backend=backend)(*given) - function(*given)).abs().max().item()


def main() -> None:
    """Print the errors."""
    errors = {function.__name__: error(function) for function in (added, added_to, written_out)}
    print(torch.__version__, errors)
    sys.exit(0 if min(errors["added"], errors["added_to"]) > 1 else 1)


if __name__ == "__main__":
    main()
