"""Programs whose kernels could be fewer, after public issues; each is a target of `tpcompile fusion record`.

    tpcompile fusion record repro.fusion.missed_programs:metrics --arch sm_90

`repro/fusion/known_misses.py` records all of them, with what was found to be the reason and with what helps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

import tpcompile
from tpcompile.target import TargetContext

# T tokens, t tokens of this rank, D model dim, H hidden dim of this rank
_TOKENS, _WIDTH, _HIDDEN = 4096, 2048, 2048


def _metrics(x: Tensor) -> tuple[Tensor, ...]:
    return x.abs().max(), x.abs().mean(), x.square().mean()


def metrics(ctx: TargetContext) -> tpcompile.Target:
    """pytorch 161138: three numbers of one tensor."""
    return tpcompile.Target(program=_metrics, inputs=(torch.randn(4096, 4096, device=ctx.device),))


def _small_product_first(a: Tensor, b: Tensor, c: Tensor, d: Tensor, w: Tensor) -> Tensor:
    product = (a + c)[:, :, None, None] * (b * d + c)[:, None, :, None]
    return (product * w).sum((1, 2))


def _large_product_first(a: Tensor, b: Tensor, c: Tensor, d: Tensor, w: Tensor) -> Tensor:
    product = (b * d + c)[:, None, :, None] * w
    return ((a + c)[:, :, None, None] * product).sum((1, 2))


def small_product_first(ctx: TargetContext) -> tpcompile.Target:
    """pytorch 142316: the operands in the order in which Inductor of torch 2.11 makes two kernels."""
    return tpcompile.Target(program=_small_product_first, inputs=_factors(ctx))


def large_product_first(ctx: TargetContext) -> tpcompile.Target:
    """The same numbers, multiplied in a different order."""
    return tpcompile.Target(program=_large_product_first, inputs=_factors(ctx))


def _factors(ctx: TargetContext) -> tuple[Tensor, ...]:
    shape = ctx.settings.get("rows", 1000), 16
    factors = [torch.randn(shape, device=ctx.device) for _ in range(4)]
    return (*factors, torch.randn(16, 16, 64, device=ctx.device))


def _shard_and_weight(ctx: TargetContext) -> tuple[Tensor, ...]:
    x_tD = torch.randn(_TOKENS // ctx.world_size, _WIDTH, device=ctx.device, dtype=torch.bfloat16)
    return x_tD, torch.randn(_WIDTH, _HIDDEN, device=ctx.device, dtype=torch.bfloat16)


def gathered_bmm(ctx: TargetContext) -> tpcompile.Target:
    """NeMo Automodel 2987: a linear layer that calls bmm, behind an all-gather."""

    def program(x_tD: Tensor, w_DH: Tensor) -> Tensor:
        x_TD = funcol.all_gather_tensor(x_tD, 0, dist.group.WORLD)  # tokens of a rank -> tokens of all
        return torch.bmm(x_TD[None], w_DH[None]).relu()

    return tpcompile.Target(program=program, inputs=_shard_and_weight(ctx))


def gathered_mm(ctx: TargetContext) -> tpcompile.Target:
    """The same as a plain matmul."""

    def program(x_tD: Tensor, w_DH: Tensor) -> Tensor:
        x_TD = funcol.all_gather_tensor(x_tD, 0, dist.group.WORLD)  # tokens of a rank -> tokens of all
        return (x_TD @ w_DH).relu()

    return tpcompile.Target(program=program, inputs=_shard_and_weight(ctx))


def sequence_parallel(ctx: TargetContext) -> tpcompile.Target:
    """vLLM 27699: matmul, reduce-scatter, residual and norm, quantisation, all-gather, matmul."""
    return tpcompile.Target(program=_between_two_matmuls, inputs=_quantised(ctx))


def _between_two_matmuls(
    x_TH: Tensor, down_HD: Tensor, residual_tD: Tensor, norm_D: Tensor, scale: Tensor, up_DH: Tensor
) -> tuple[Tensor, Tensor]:
    y_TD = torch._scaled_mm(x_TH, down_HD, scale, scale, out_dtype=torch.bfloat16)
    y_tD = funcol.reduce_scatter_tensor(y_TD, "sum", 0, dist.group.WORLD)  # partial -> sharded by token
    residual_tD = residual_tD + y_tD
    h_tD = F.rms_norm(residual_tD, (residual_tD.shape[-1],), norm_D)
    quantised_tD = (h_tD.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
    h_TD = funcol.all_gather_tensor(quantised_tD, 0, dist.group.WORLD)  # sharded by token -> replicated
    return torch._scaled_mm(h_TD, up_DH, scale, scale, out_dtype=torch.bfloat16), residual_tD


def _quantised(ctx: TargetContext) -> tuple[Tensor, ...]:
    def empty(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
        return torch.empty(*shape, device=ctx.device, dtype=dtype)

    residual_tD = empty(_TOKENS // ctx.world_size, _WIDTH, dtype=torch.bfloat16)
    norm_D = empty(_WIDTH, dtype=torch.bfloat16)
    scale = empty(1, dtype=torch.float32)
    x_TH, down_HD, up_DH = empty(_TOKENS, _HIDDEN), empty(_WIDTH, _HIDDEN).t(), empty(_HIDDEN, _WIDTH).t()
    return x_TH, down_HD, residual_tD, norm_D, scale, up_DH
