"""The kernels as Inductor compiles them: a Python float is float64 there, and must not make the arithmetic float64."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tpcompile.fastpath.kernels import qk_head_norm, qk_norm, qkv_pack, token_norm

INPUTS = {"q", "k", "q_weight", "k_weight", "x", "branch", "weight", "gate", "shift", "scale"}
OUTPUTS = {"q_out", "k_out", "total", "out"}
TABLES = {"sums", "cos", "sin"}
HEADS = {"PAIRS_PER_HEAD": 64, "PAIRS": 64, "Q_HEADS": 4, "K_HEADS": 4}


@triton.jit
def uncast_kernel(x, out, width, eps, BLOCK: tl.constexpr):
    """What a kernel is without the cast."""
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + at, values * tl.rsqrt(tl.sum(values * values) / width + eps), mask=at < width)


def float64_arithmetic(kernel: Any, constants: dict[str, Any]) -> list[str]:
    """Instructions on float64 in the PTX for an H100 or H200, other than conversions."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "eps":
            signature[name] = "fp64"
        elif name in TABLES:
            signature[name] = "*fp32"
        else:
            signature[name] = "*bf16" if name in INPUTS | OUTPUTS else "i32"
    indices = {(index,): constants[name] for index, name in enumerate(kernel.arg_names) if name in constants}
    source = ASTSource(kernel, signature, indices)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    lines = [line.strip() for line in str(compiled.asm["ptx"]).splitlines()]
    return [line for line in lines if ".f64" in line and line.startswith(("mul", "add", "fma", "div", "rsqrt", "sub"))]


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (qkv_pack.qkv_pack_kernel, {**HEADS, "INTERLEAVED": True}),
        (qk_norm.qk_apply_kernel, {**HEADS, "INTERLEAVED": False}),
        (qk_head_norm.qk_head_norm_kernel, {**HEADS, "INTERLEAVED": True}),
        (token_norm.add_norm_kernel, {"BLOCK": 1024}),
        (token_norm.modulated_norm_kernel, {"BLOCK": 1024}),
    ],
    ids=lambda given: given.fn.__name__ if hasattr(given, "fn") else "",
)
def test_a_python_float_leaves_the_arithmetic_in_float32(kernel: Any, constants: dict[str, Any]) -> None:
    assert not float64_arithmetic(kernel, constants)


def test_without_the_cast_all_of_it_is_in_float64() -> None:
    assert len(float64_arithmetic(uncast_kernel, {"BLOCK": 1024})) > 4
