"""The kernel for one GPU against float64, and its time against Inductor's code at tp 1 of Wan-14B: $OUT/single.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from common import DEVICE, DRY, EPS, SIZE, WIDTH, Report, in_float64  # isort: skip

import bench_fastpath
import torch
import triton

from tpcompile.fastpath import plain
from tpcompile.fastpath.kernels import qk_norm, qkv_pack
from tpcompile.numerics.error_ratio import relative

TOKENS = (3, 1) if DRY else (4680, 256, 8, 1)


def single() -> None:
    """Right first; then times, the largest first."""
    report = Report("single")
    report.run("machine", machine)
    for tokens in TOKENS:
        for interleaved in (False, True):
            report.run(f"right: {tokens} tokens, {rope(interleaved)}", lambda t=tokens, i=interleaved: right(t, i))
    for tokens in TOKENS:
        for interleaved in (True, False):
            report.run(f"time: {tokens} tokens, {rope(interleaved)}", lambda t=tokens, i=interleaved: timed(t, i))
        if tokens in (TOKENS[0], 256):
            report.run(f"forms: {tokens} tokens, interleaved", lambda t=tokens: forms(t))


def rope(interleaved: bool) -> str:
    return "interleaved" if interleaved else "halves"


def machine() -> dict[str, Any]:
    name = "interpreter" if DRY else torch.cuda.get_device_name()
    return {"torch": torch.__version__, "triton": triton.__version__, "gpu": name}


def packed(tokens: int, interleaved: bool) -> dict[str, Any]:
    """Arguments in bfloat16: heads that differ in scale by a factor of 16."""
    generator = torch.Generator().manual_seed(tokens)
    heads = WIDTH // SIZE
    scales = 4 ** torch.linspace(-1, 1, 3 * heads)[:, None]
    qkv = (torch.randn(1, tokens, 3 * heads, SIZE, generator=generator) * scales).flatten(2)
    angles = torch.randn(tokens, SIZE // 2, generator=generator)
    weight = torch.linspace(0.5, 2, WIDTH)
    tensors = {"qkv": qkv, "q_weight_d": weight, "k_weight_c": 1 / weight}
    moved = {name: tensor.to(DEVICE, torch.bfloat16) for name, tensor in tensors.items()}
    tables = {"cos_SR": angles.cos().to(DEVICE), "sin_SR": angles.sin().to(DEVICE)}
    return {**moved, **tables, "eps": EPS, "interleaved": interleaved}


def right(tokens: int, interleaved: bool) -> dict[str, Any]:
    """Its error as a multiple of the plain code's in the same dtype."""
    given = packed(tokens, interleaved)
    exact = plain.qkv_pack(**in_float64(given))
    errors, usual = (
        [relative(found, wanted) for found, wanted in zip(code(**given), exact, strict=True)]
        for code in (qkv_pack.qkv_pack_rmsnorm_rope, plain.qkv_pack)
    )
    ratios = [round(error / max(known, 1e-9), 3) for error, known in zip(errors[:2], usual[:2], strict=True)]
    if not (max(ratios) <= 2.5 and errors[2] == 0):
        raise AssertionError(f"errors {errors}, plain code {usual}")
    return {"ratios of q, k to plain bfloat16": ratios}


def timed(tokens: int, interleaved: bool) -> dict[str, Any]:
    """A cell of tpcompile/fastpath/ratios.json."""
    variant = "interleaved" if interleaved else ""
    cell = bench_fastpath.Bench(bench_fastpath.ON_ONE_GPU, tokens, 1, (40, 40), variant=variant)
    if DRY:
        return {"cell": str(cell)}
    torch._dynamo.reset()
    found = bench_fastpath.measure(cell)
    return {"ratio": found["ratio_to_inductor"], **found["us"], "cell": found}


def forms(tokens: int) -> dict[str, Any]:
    """us with different numbers of warps, of the two kernels for shards, and of a copy of q and k."""
    given = packed(tokens, True)
    q, k, _ = given["qkv"].split(WIDTH, -1)
    rest = {name: value for name, value in given.items() if name != "qkv"}
    calls: dict[str, Callable[[], Any]] = {
        "two kernels": lambda: qk_norm.qk_norm_rope(q, k, **rest, counts=(WIDTH, WIDTH)),
        "copy of q, k": torch.cat((q, k), -1).clone,
    }
    found = {name: us(call) for name, call in calls.items()}
    for warps in (4, 8, 16):
        with mock.patch.object(qkv_pack, "warps_of", lambda width, warps=warps: warps):
            found[f"{warps} warps"] = us(lambda: qkv_pack.qkv_pack_rmsnorm_rope(**given))
    return found


def us(call: Callable[[], Any]) -> float:
    """Median of 7 rounds in a CUDA graph."""
    call()
    if DRY:
        return 0.0
    graph = bench_fastpath.captured(call)
    rounds = sorted(bench_fastpath.time_us(graph, 20) / bench_fastpath.CALLS for _ in range(7))
    return float(round(rounds[3], 2))


if __name__ == "__main__":
    with torch.no_grad():
        single()
