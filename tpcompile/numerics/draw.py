"""Module or block configuration, and a seed -> full weights and inputs, equal on all ranks.

Scales differ per head (0.25 to 4): on iid data a norm over the local shard is off by 1 % only, the size of a bf16
tolerance, while on head-skewed data it is off by more than half.

values       drawn as
skewed       normal, inputs of a block and projections of its attentions scaled per head: the default
iid          normal, no scales: only to show what skew is for
integers     small whole numbers: in float32 and float64 every product and every sum of up to 2**24 is exact, in any
             order, so that linear layers must agree bit for bit and any error at all is a bug
"""

# B batch, S sequence, T context tokens, D model width, E head size
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import Collectives
from tpcompile.config import BlockConfig
from tpcompile.fastpath.plain import stat_dtype
from tpcompile.layout import Layout
from tpcompile.nn.attention import Attention, CrossAttention
from tpcompile.nn.block import BlockInputs, TransformerStack
from tpcompile.nn.rope import rope_tables
from tpcompile.nn.sharding import specs_of

Values = Literal["skewed", "iid", "integers"]
_SEED_OF_RUNS = 2
_NORM_SPREAD, _BIAS_SCALE = 0.2, 0.1
"""Norm weights of one, or biases of zero, would hide a norm or a bias that a rank leaves out or applies twice."""


def draw_stack_weights(
    config: BlockConfig, *, seed: int, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """Unsharded weights of a `TransformerStack`, as `draw_weights`; q and k rows are head-skewed."""
    with torch.device("meta"):
        module = TransformerStack(config, Collectives(None), num_layers=config.num_layers)
    return draw_weights(module, seed=seed, dtype=dtype, device=device)


def draw_weights(
    module: nn.Module,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    values: Values = "skewed",
    layouts: Mapping[str, Layout] | None = None,
) -> dict[str, Tensor]:
    """Unsharded weights for a module built with a group of size 1, e.g. on the meta device.

    No bias is zero and no norm weight one. Drawn in float32 and cast, so that every dtype holds the same numbers,
    rounded. Every parameter must be declared by a module's `shard_specs()`, unless `layouts` are given.
    """
    generator = torch.Generator(device).manual_seed(seed)
    specs, skews = specs_of(module, layouts=layouts), _head_skews(module)
    full = {}
    for name, parameter in module.named_parameters():
        drawn = _draw(name, tuple(parameter.shape), generator, values)
        skew = skews.get(name.rpartition(".")[0], ())
        if skew and values == "skewed":
            sizes = specs[name].sizes
            for part, size, heads in zip(drawn.split(list(sizes), 0), sizes, skew, strict=True):
                if heads:  # views of the rows: `drawn` is scaled in place
                    part *= head_scales(heads, size, device=device).view(-1, *[1] * (drawn.dim() - 1))
        full[name] = drawn.to(dtype)
    return full


def draw_inputs(
    config: BlockConfig,
    *,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
    seq_len: int,
) -> BlockInputs:
    """Inputs of a stack of this form: x [B, S, D] and context [B, T, D] in `dtype`, RoPE tables and modulation in
    float32 (float64 for float64), mask [B, 1, 1, S] that hides the last third of the keys from sequence 0.

    Activations are drawn in float32 and skewed per head-sized chunk of D.
    """
    generator = torch.Generator(device).manual_seed(seed)
    heads = config.num_heads
    x = draw_normal((config.batch, seq_len, config.dim), generator, num_heads=heads).to(dtype)
    cos, sin = rope_tables(config.head_dim, seq_len, device=device, dtype=stat_dtype(dtype))
    modulation = context = mask = drop_seed = None
    if config.modulation:
        shape = (config.batch, 6, config.dim)
        modulation = (draw_normal(shape, generator) * 0.5).to(stat_dtype(dtype))
    if config.cross_attention:
        shape = (config.batch, config.context_len or seq_len, config.dim)
        context = draw_normal(shape, generator, num_heads=heads).to(dtype)
    if config.masked:
        mask = torch.ones(config.batch, 1, 1, seq_len, dtype=torch.bool, device=device)
        mask[0, ..., seq_len - seq_len // 3 :] = False
    if config.dropout:
        drop_seed = torch.tensor([seed], device=device)
    return BlockInputs(x, cos, sin, modulation, context, mask, drop_seed)


def head_scales(num_heads: int, width: int, *, device: torch.device | str) -> Tensor:
    """[width], constant per head, from 0.25 to 4 over the heads; a negative `num_heads` goes from 4 to 0.25."""
    scales = torch.logspace(-2, 2, abs(num_heads), base=2, device=device)
    scales = scales.flip(0) if num_heads < 0 else scales
    return scales.repeat_interleave(-(-width // abs(num_heads)))[:width]


def draw_normal(
    shape: Sequence[int], generator: torch.Generator, *, num_heads: int = 0, values: Values = "skewed"
) -> Tensor:
    """Activations in float32, equal on all ranks for equal seeds; scales per head-sized chunk of the last dim.

    `num_heads=0` scales nothing; see the top of this file for `values`.
    """
    if values == "integers":
        return torch.randint(-2, 3, tuple(shape), generator=generator, device=generator.device).float()
    x = torch.randn(tuple(shape), generator=generator, device=generator.device)
    return x * head_scales(num_heads, shape[-1], device=generator.device) if num_heads and values == "skewed" else x


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator, values: Values) -> Tensor:
    """A parameter, scaled by its role: any other vector than a bias is the weight of a norm."""
    kind = "norm" if len(shape) == 1 else "weight"
    if name.endswith("bias"):
        kind = "bias"
    if values == "integers":
        low, high = {"norm": (1, 3), "weight": (-1, 2), "bias": (-2, 3)}[kind]
        return torch.randint(low, high, shape, generator=generator, device=generator.device).float()
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if kind == "norm":
        return 1 + _NORM_SPREAD * noise
    return noise * (shape[-1] ** -0.5 if kind == "weight" else _BIAS_SCALE)


def _head_skews(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Projection of an attention -> per packed part, the heads whose scales are spread; negative reverses, 0 is none.

    Without a norm on q and k, equal skews would multiply in the logits; opposite ones cancel.
    """
    skews: dict[str, tuple[int, ...]] = {}
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(child, Attention):
            q_width, kv_width, _ = child.wqkv.layout.sizes
            num_q_heads = q_width // child.head_dim
            num_kv_heads = kv_width // child.head_dim
            kv_skew = -num_kv_heads if child.qk_norm is None else num_kv_heads
            skews[f"{prefix}wqkv"] = (num_q_heads, kv_skew, 0)
        elif isinstance(child, CrossAttention):
            num_q_heads = child.wq.layout.sizes[0] // child.head_dim
            num_kv_heads = child.wkv.layout.sizes[0] // child.head_dim
            skews[f"{prefix}wq"] = (num_q_heads,)
            skews[f"{prefix}wkv"] = (-num_kv_heads if child.k_norm is None else num_kv_heads, 0)
    return skews


@contextmanager
def drawing_alike() -> Iterator[None]:
    """What torch draws within is the same in each call on each rank: masks of dropout on what all ranks hold."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(_SEED_OF_RUNS)
        yield
