"""Upstream bug: Inductor reduces a concatenation in place, and with it the parts that are read afterwards.

    torchrun --standalone --nproc-per-node 2 repro/inductor_all_reduce_of_cat.py

`all_reduce(torch.cat((a, b)))` is functional: a and b stay what they were. Inductor computes a and b straight into the
concatenation's buffer, leaves out the copy it owes the functional op, and reduces that buffer in place; every later
read of a or b gets the reduced numbers. No warning, one graph, equal on all ranks. Seen with torch 2.11.0 and 2.13.0 on
CPU. `aot_eager` is right, so eager against compiled shows it. What helps: read nothing that went into a packed
all-reduce afterwards, or keep a copy that is no plain copy, `torch.where(x == x, x, x)`, as the operand.

Prints the error of each program; exit status 1 when torch is wrong, 0 when it is right.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor


def packed(x: Tensor, y: Tensor, group_name: str) -> Tensor:
    """Two local statistics, reduced together; the first is used again."""
    a, b = (x * y).sum(-1, keepdim=True), (x + y).sum(-1, keepdim=True)
    return _all_reduce(torch.cat((a, b), -1), group_name).sum(-1, keepdim=True) * a


def kept_apart(x: Tensor, y: Tensor, group_name: str) -> Tensor:
    """The same with an operand that is no plain copy of the concatenation."""
    a, b = (x * y).sum(-1, keepdim=True), (x + y).sum(-1, keepdim=True)
    both = torch.cat((a, b), -1)
    return _all_reduce(torch.where(both == both, both, both), group_name).sum(-1, keepdim=True) * a


def error(program: object, device: torch.device) -> float:
    """Largest difference between compiled and eager."""
    torch._dynamo.reset()
    assert dist.group.WORLD is not None and callable(program)
    name = dist.group.WORLD.group_name
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = (torch.randn(4, 8, generator=generator).to(device) for _ in range(2))
    eager = program(x, y, name)
    return float((torch.compile(program, fullgraph=True)(x, y, name) - eager).abs().max())


def _all_reduce(x: Tensor, group_name: str) -> Tensor:
    pending = torch.ops._c10d_functional.all_reduce(x, "sum", group_name)
    return torch.ops._c10d_functional.wait_tensor(pending)


def main() -> int:
    """Run both programs on this rank."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    errors = {program.__name__: error(program, device) for program in (packed, kept_apart)}
    if dist.get_rank() == 0:
        print(
            f"torch {torch.__version__} on {device.type}:", ", ".join(f"{k} off by {v:.2g}" for k, v in errors.items())
        )
    dist.destroy_process_group()
    return int(max(errors.values()) > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
