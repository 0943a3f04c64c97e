"""One GPU: the products of a block at 8 tokens, weights cold, in one CUDA graph with stand-ins for norms and attention.

    python scripts/bench_few_rows.py --json few_rows.json

Wan-14B's shard of 2 ranks, bfloat16, 4 layers with their own weights. Between the products are kernels of 4.2 us on 8
multiprocessors: two after qkv (norms, attention), one after the output projection and one after the MLP. Forms: cuBLAS;
`few_rows_linear` launched as any kernel; and started early.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tpcompile.fastpath.kernels.few_rows import few_rows_kernel, few_rows_linear
from tpcompile.torch_api.early_start import let_start_early

TOKENS, LAYERS, STAND_IN_US = 8, 4, 4.2
SHAPES = {"qkv": (7680, 5120), "o": (5120, 2560), "up": (6912, 5120), "down": (5120, 6912)}
"""Output and input features of each product."""


@triton.jit
def stand_in(y, x, one, y_width, x_width, num_steps, BLOCK: tl.constexpr):
    """Columns of one row, scaled to less than 1, after so many steps that do nothing."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(y + row * y_width + at, mask=at < x_width, other=0.0).to(tl.float32)
    scale = tl.load(one)
    for _ in range(num_steps):
        scale = scale * 1.0000001 + 1e-9
    values = values / (1.0 + tl.abs(values)) * tl.where(scale > 0.5, 1.0, scale)
    tl.store(x + row * x_width + at, values.to(tl.bfloat16), mask=at < x_width)


def graph_us(call: Callable[[], None], rounds: int = 20) -> float:
    """The median time of a replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times_ms = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return 1e3 * statistics.median(times_ms)


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    """Random-normal bfloat16."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


class Chain:
    """All products of the layers, with a stand-in before each but down."""

    def __init__(self) -> None:
        self.weights = [{name: draw(*shape, scale=0.02) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
        self.x = {name: draw(TOKENS, width) for name, (_, width) in SHAPES.items()}
        self.first, self.one, self.num_steps = draw(TOKENS, 5120), torch.ones(1, device="cuda"), 0
        self.num_steps = self._steps()

    def between(self, y: Tensor, name: str) -> None:
        """Its columns become the input of a product."""
        x = self.x[name]
        stand_in[(TOKENS,)](y, x, self.one, y.shape[1], x.shape[1], self.num_steps, BLOCK=8192, num_warps=8)

    def run(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        """All layers; the last output is in `x["qkv"]`."""
        self.x["qkv"].copy_(self.first)
        for weight in self.weights:
            self.between(product(self.x["qkv"], weight["qkv"]), "o")
            self.between(self.x["o"], "o")
            self.between(product(self.x["o"], weight["o"]), "up")
            hidden = product(self.x["up"], weight["up"])
            self.between(product(hidden, weight["down"]), "qkv")

    def _steps(self) -> int:
        y, many = draw(TOKENS, 5120), 20

        def run() -> None:
            for _ in range(many):
                self.between(y, "qkv")

        times_us = []
        for self.num_steps in (0, 2000):
            times_us.append(graph_us(run) / many)
        return int(2000 * (STAND_IN_US - times_us[0]) / (times_us[1] - times_us[0]))


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Without a bias."""
    return few_rows_linear(x, weight, None)


def main() -> None:
    """Times of a block, and whether the early start changes a bit of the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    chain = Chain()
    found: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    block_us: dict[str, float] = {}
    outputs = {}
    for name, product in (("cublas", F.linear), ("few_rows", few_rows), ("few_rows, started early", few_rows)):
        if name.endswith("early"):
            let_start_early(few_rows_kernel)
        block_us[name] = round(graph_us(partial(chain.run, product)) / LAYERS, 2)
        outputs[name] = chain.x["qkv"].clone()
    found["block_us"] = block_us
    found["same_bits"] = torch.equal(outputs["few_rows"], outputs["few_rows, started early"])
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
