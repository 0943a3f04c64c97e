"""A fused kernel of your own that may run on shards: declared, with the cases that certify it.

    tpcompile certify head_norm --import examples.fast_path
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 -m examples.use_fast_path   # without a GPU

Until it is certified, and after each edit, it is refused where tensors are sharded.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpcompile.fastpath import fast_path
from tpcompile.fastpath.certify import Case, trial
from tpcompile.fastpath.kernels.op import kernel_op, launchable
from tpcompile.layout import Part, ShardSpec


def plain_norm(x: Tensor, eps: float) -> Tensor:
    """What the kernel replaces; x is [batch, token, head, head size]."""
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@triton.jit
def head_norm_kernel(x, y, size, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One head of one token."""
    row, at = tl.program_id(0).to(tl.int64) * size, tl.arange(0, BLOCK)
    values = tl.load(x + row + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y + row + at, values * tl.rsqrt(tl.sum(values * values) / size + tl.cast(eps, tl.float32)), mask=at < size)


@fast_path("head_norm", replaces=plain_norm, tp="per_head", contiguous=("x",))
@kernel_op("my_kernels::head_norm")
def head_norm(x: Tensor, eps: float) -> Tensor:
    """Norm of each head, which is whole on its rank: right on a shard of the heads."""
    y, size = torch.empty_like(x), x.shape[-1]
    if x.numel():
        launchable(head_norm_kernel)[(x.numel() // size,)](x, y, size, eps, BLOCK=triton.next_power_of_2(size))
    return y


head_norm.register_fake(lambda x, eps: torch.empty_like(x))  # type: ignore[attr-defined]  # an op of torch

SAME, FAR = {"launchable(*": "how it is launched"}, {"*.to(tl.int64) -> *": "takes 2^31 elements"}
"""Mutations of the kernel that no case can catch, and why."""


@trial("head_norm", equivalent=SAME, unreached=FAR)
def cases(tp: int) -> Iterator[Case]:
    """Heads that differ in scale by a factor of 1000: a norm over the wrong width is far off."""
    heads, seed = ShardSpec(dim=2, parts=(Part(8),)), torch.Generator().manual_seed(0)  # 8 heads over the ranks
    for tokens in (0, 1, 3):
        x = torch.randn(2, tokens, 8, 80, dtype=torch.float64, generator=seed) * torch.logspace(-3, 0, 8)[:, None]
        yield Case(name=f"{tokens} tokens", arguments={"x": x, "eps": 1e-6}, shards={"x": heads}, outputs=(heads,))
