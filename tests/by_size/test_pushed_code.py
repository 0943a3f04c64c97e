"""What Inductor makes of pushed sums, forward and backward on 2 gloo ranks: numbers, what is beside them, memory."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache, run_and_get_code

from tests.by_size.rows import IN_FLIGHT
from tpcompile import collectives
from tpcompile.by_size.setting import Sums
from tpcompile.testing import run_on_ranks

pytestmark = pytest.mark.slow
MARKS = {
    "_push_start(": "s",
    "_push_product(": "S",
    "_push_receive(": "r",
    "_push_release(": "e",
    "extern_kernels.": "p",
}
"""In the order of the code; S sends what it computes."""


class Layers(nn.Module):
    """Two of them, of a norm and an MLP whose hidden features are sharded, each with a residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16, dtype=torch.float64) / 4 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            hidden = torch.relu(collectives.copy_to_tp(normed, group=dist.group.WORLD) @ self.weights[2 * i])
            x = x + collectives.all_reduce(hidden @ self.weights[2 * i + 1], group=dist.group.WORLD)
        return x


def pushed() -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    layers = Layers()
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()

    def step(program: Any) -> list[Tensor]:
        for one in (x, *layers.parameters()):
            one.grad = None
        y = program(x)
        y.square().sum().backward()
        return [y.detach(), *(one.grad for one in (x, *layers.parameters()) if one.grad is not None)]

    torch.compiler.reset()
    expected = step(layers)
    with fresh_cache():
        compiled = torch.compile(layers, fullgraph=True, dynamic=False, options=Sums(IN_FLIGHT).options)
        found, codes = run_and_get_code(step, compiled)
    errors = [float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)]
    return {"errors": errors, "codes": [code[code.index("def call") :] for code in codes]}


@cache
def seen() -> dict[str, Any]:
    first, _ = run_on_ranks(pushed)
    return dict(first)


def events(code: str) -> str:
    lines = [line.replace(".default(", "(") for line in code.splitlines() if "assert_" not in line]
    return "".join(mark for line in lines for text, mark in MARKS.items() if text in line)


def test_values_and_gradients_are_those_of_eager() -> None:
    errors = seen()["errors"]
    assert len(errors) == 6 and max(errors) < 1e-12


def test_forward_products_send_what_they_compute() -> None:
    forward, _ = seen()["codes"]
    assert events(forward) == "pSrepSr"


def test_backward_sums_have_the_product_of_the_weights_gradient_beside_them() -> None:
    _, backward = seen()["codes"]
    assert re.fullmatch("p+sprep+spr", events(backward)), events(backward)


@pytest.mark.parametrize("phase", [0, 1])
def test_one_kernel_adds_what_was_received_and_none_reads_it_after_the_release(phase: int) -> None:
    """Nor does a later result take its memory, to which the peer may write by then."""
    code = seen()["codes"][phase]
    first, _last = re.findall(r"(buf\d+) = .*_push_receive\.default\(", code)
    (part,) = re.findall(rf"(buf\d+) = {first}\n", code)
    kernel, release, gone = (
        line.strip()
        for line in code.splitlines()
        if re.search(rf"\b{part}\b", line) and not re.search(rf"assert_|#|{part} = {first}$", line)
    )
    read = re.search(rf"_push_release\.default\((buf\d+), \[{part}\]\)", release)
    assert read is not None and gone == f"del {part}"
    assert re.match(rf"cpp_fused\w*\(.*\b{read[1]}\b", kernel), kernel
