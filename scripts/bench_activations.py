"""SiLU-mul and GELU-tanh as Triton kernels against Inductor's code: why neither ships as a fast path.

    python scripts/bench_activations.py OUT.json

One GPU, bf16, CUDA graphs; as in bench_fastpath, every program has a code object of its own, rounds alternate, and a
cell is the median of the ratios. The kernels are tried with several block sizes, and the best one of a cell counts.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from bench_fastpath import CALLS, ROUND_US, ROUNDS, captured, regions_per_call, time_us

BLOCKS = (1024, 2048, 4096, 8192)
WIDTHS = {"silu_mul": (14336, 7168, 1792), "gelu_tanh": (13824, 6912, 1728)}
"""Of llama8b and of wan14b, at tp 1, 2 and 8."""


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """One program: a block of a row; gate and up lie beside each other in a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=mask).to(tl.float32)
    tl.store(out + row * width + at, (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32) * up, mask=mask)


@triton.jit
def gelu_tanh_kernel(x, out, width, BLOCK: tl.constexpr):
    """One program: a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    value = tl.load(x + row * width + at, mask=mask).to(tl.float32)
    inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
    tl.store(out + row * width + at, value * tl.sigmoid(2 * inner), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[S, 2 * F] -> [S, F]."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """[S, F] -> [S, F]."""
    return torch.nn.functional.gelu(x, approximate="tanh")


PLAIN: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "silu_mul": (silu_mul, silu_mul_kernel),
    "gelu_tanh": (gelu_tanh, gelu_tanh_kernel),
}


def measure(name: str, tokens: int, width: int) -> dict[str, Any]:
    """One cell."""
    plain, kernel = PLAIN[name]
    x = torch.randn(tokens, 2 * width if name == "silu_mul" else width, device="cuda", dtype=torch.bfloat16)

    def launch(block: int) -> Tensor:
        out = x.new_empty(tokens, width)
        kernel[tokens, triton.cdiv(width, block)](x, out, width, BLOCK=block, num_warps=max(4, block // 512))
        return out

    torch._dynamo.reset()
    fast = torch.compile(plain, fullgraph=True, dynamic=False)
    torch.testing.assert_close(launch(BLOCKS[0]), plain(x), rtol=2e-2, atol=2e-2)
    programs = {"inductor": lambda: fast(x)} | {f"block {b}": lambda b=b: launch(b) for b in BLOCKS}
    regions = regions_per_call(programs["inductor"])
    graphs = {label: captured(call) for label, call in programs.items()}
    replays = max(1, round(ROUND_US / max(time_us(graph, 1) for graph in graphs.values())))
    rounds = []
    for index in range(ROUNDS):
        order = list(graphs) if index % 2 else list(reversed(graphs))
        rounds.append({label: time_us(graphs[label], replays) / CALLS for label in order})
    us = {label: round(statistics.median(one[label] for one in rounds), 2) for label in graphs}
    best = min((label for label in us if label != "inductor"), key=us.__getitem__)
    ratio = round(statistics.median(one["inductor"] / one[best] for one in rounds), 3)
    cell = {"activation": name, "tokens": tokens, "width": width, "best": best, "ratio_to_inductor": ratio, "us": us}
    return cell | {"regions": {"inductor": regions}}


def main() -> None:
    """Measure all cells, print them and write them."""
    cells = [
        measure(name, tokens, width) for name in PLAIN for width in WIDTHS[name] for tokens in (8, 64, 256, 1024, 4680)
    ]
    for cell in cells:
        us = cell["us"]
        print(
            f"{cell['activation']:10} {cell['tokens']:5} x {cell['width']:6} {us['inductor']:8.2f} us "
            f"{us[cell['best']]:8.2f} us ({cell['best']})  {cell['ratio_to_inductor']:5.2f}"
        )
    about = {
        "command": "python " + " ".join(sys.argv),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()},
    }
    Path(sys.argv[1]).write_text(json.dumps({**about, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
