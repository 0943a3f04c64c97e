"""Programs by how they are compiled: fp8, modes of Inductor, custom ops, kernels of Triton, dynamic sizes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dryrun.healthy.by_hand import WIDTH, Network
from tpcompile.target import Target, TargetContext

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


@torch.library.custom_op("tests_dryrun::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    """x times factor."""
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(lambda ctx, gradient: (gradient, None))


def _x(ctx: TargetContext, *shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 16, WIDTH)), device=ctx.device)


def _network(ctx: TargetContext) -> nn.Module:
    return Network(ctx.mesh.get_group("tp")).to(ctx.device)


def autotuned(ctx: TargetContext) -> Target:
    """Inductor's modes and options, and a full graph."""
    program = torch.compile(_network(ctx), mode="max-autotune", fullgraph=True)
    return Target(program=program, inputs=(_x(ctx),), is_compiled=True)


def with_options(ctx: TargetContext) -> Target:
    """Inductor's options; as a decorator; a backend by name."""

    @torch.compile(backend="inductor", options={"max_autotune": True, "epilogue_fusion": True}, dynamic=False)
    def program(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x.relu()

    group = ctx.mesh.get_group("tp")
    return Target(program=program, inputs=(_x(ctx),), is_compiled=True)


def imported_compile(ctx: TargetContext) -> Target:
    """`from torch import compile`, and a module that compiles itself."""
    from torch import compile as compile_

    network = _network(ctx)
    network.compile(mode="reduce-overhead")
    program = compile_(network, mode="reduce-overhead")
    return Target(program=program, inputs=(_x(ctx),), is_compiled=True, num_graphs=None)


def custom_op(ctx: TargetContext) -> Target:
    """An op of the user's own."""
    network = _network(ctx)

    def program(x: Tensor) -> Tensor:
        return scaled(network(x), 2.0)

    return Target(program=program, inputs=(_x(ctx),), tp_aware=("tests_dryrun::scaled",))


def float8(ctx: TargetContext) -> Target:
    """fp8 matrix product with scales."""
    group = ctx.mesh.get_group("tp")
    weight = _x(ctx, WIDTH, WIDTH).to(torch.float8_e4m3fn)

    def program(x: Tensor, weight: Tensor) -> Tensor:
        scale = x.abs().amax().float() / 448.0
        dist.all_reduce(scale, dist.ReduceOp.MAX, group=group)
        x8 = (x / scale).to(torch.float8_e4m3fn)
        return torch._scaled_mm(x8, weight.t(), scale, scale.new_ones(()), out_dtype=torch.bfloat16)

    return Target(program=program, inputs=(_x(ctx, 16, WIDTH).bfloat16(), weight))


def dynamic(ctx: TargetContext) -> Target:
    """`dynamic=True`, and a second size."""
    program = torch.compile(_network(ctx), dynamic=True)
    return Target(program=program, inputs=(_x(ctx),), resized=(_x(ctx, 2, 24, WIDTH),), is_compiled=True)


def marked(ctx: TargetContext) -> Target:
    """A dimension that is marked."""
    x, longer = _x(ctx), _x(ctx, 2, 24, WIDTH)
    torch._dynamo.mark_dynamic(x, 1)
    return Target(program=_network(ctx), inputs=(x,), resized=(longer,))


if triton is not None:

    @triton.jit
    def _double(x_ptr, y_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < size
        tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=mask), mask=mask)


def own_kernel(ctx: TargetContext) -> Target:
    """A kernel of Triton in the compiled region."""
    group = ctx.mesh.get_group("tp")

    def program(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _double[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), BLOCK=128)
        dist.all_reduce(y, group=group)
        return y

    return Target(program=program, inputs=(_x(ctx),), tp_aware=("_double",))


def checkpointed(ctx: TargetContext) -> Target:
    """Activation checkpointing in the region; trained in bf16."""
    from torch.utils.checkpoint import checkpoint

    network = _network(ctx).bfloat16()

    def program(x: Tensor) -> Tensor:
        return checkpoint(network, x, use_reentrant=False)

    def step(program: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        loss = program(*inputs).float().mean()
        loss.backward()
        return loss

    return Target(program=program, inputs=(_x(ctx).bfloat16(),), step=step)


def flex(ctx: TargetContext) -> Target:
    """Flex attention with a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    mask = create_block_mask(causal, None, None, 128, 128, device=ctx.device)

    def program(q: Tensor) -> Tensor:
        return flex_attention(q, q, q, block_mask=mask)

    return Target(program=program, inputs=(_x(ctx, 1, 4, 128, 64),))


def inference(ctx: TargetContext) -> Target:
    """A decoding step: a cache that is written in place, at a position."""
    group = ctx.mesh.get_group("tp")
    cache = torch.zeros(1, 4, 32, 16, device=ctx.device)

    @torch.inference_mode()
    def program(x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        cache.index_copy_(2, position, x)
        y = torch.nn.functional.scaled_dot_product_attention(x, cache, cache)
        dist.all_reduce(y, group=group)
        return y

    position = torch.zeros(1, dtype=torch.long, device=ctx.device)
    return Target(program=program, inputs=(_x(ctx, 1, 4, 1, 16), cache, position))
