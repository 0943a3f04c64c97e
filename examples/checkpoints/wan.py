"""Wan 2.1 text-to-video blocks in the naming of diffusers (WanTransformer3DModel) <-> `TransformerStack`.

The stack is `model.blocks`. Patch and text embeddings, time embedding and the projection out are small, are not
sharded, and stay the caller's: their keys are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from examples.checkpoints.fields import build, read, refuse_others
from examples.checkpoints.keymap import KeyMap, Source, linear
from tpcompile.block_args import BlockArgs
from tpcompile.nn.rope import video_rope_tables

_FAMILY = "Wan 2.1 (diffusers)"
_SUPPORTED = {
    "_class_name": ("WanTransformer3DModel",),
    "qk_norm": ("rms_norm_across_heads",),
    "cross_attn_norm": (True,),
    "added_kv_proj_dim": (None,),
    "image_dim": (None,),
    "pos_embed_seq_len": (None,),
    "quantization_config": (None,),
}
_OUTSIDE = ("patch_embedding.", "condition_embedder.", "scale_shift_table", "proj_out.")


@dataclass(frozen=True)
class Names:
    """What one naming calls the parts of a block."""

    attention: str
    cross_attention: str
    qkv: tuple[str, str, str]
    out: str
    cross_norm: str
    up: str
    down: str
    modulation: str


_NAMES = Names(
    attention="attn1", cross_attention="attn2", qkv=("to_q", "to_k", "to_v"), out="to_out.0", cross_norm="norm2",
    up="ffn.net.0.proj", down="ffn.net.2", modulation="scale_shift_table",
)  # fmt: skip


def block_args(config: Any, *, dtype: str = "float32", **options: Any) -> BlockArgs:
    """BlockArgs of a WanTransformer3DModel's config or the dict in its config.json; `options` are further fields.

    Raises ConfigError naming what is not supported:
    image-to-video (added_kv_proj_dim, image_dim), no norm before cross-attention, a different norm of q and k.
    """
    refuse_others(config, _FAMILY, _SUPPORTED)
    head_size, heads = read(config, "attention_head_dim"), read(config, "num_attention_heads")
    return wan_args(config, _FAMILY, dim=heads * head_size, num_heads=heads, dtype=dtype, **options)


def key_map(config: Any) -> KeyMap:
    """Names and packing for this config. Raises ConfigError as `block_args`."""
    refuse_others(config, _FAMILY, _SUPPORTED)
    width = read(config, "attention_head_dim") * read(config, "num_attention_heads")
    return wan_keys(_FAMILY, _NAMES, num_layers=read(config, "num_layers"), width=width, outside=_OUTSIDE)


def rope_tables(
    config: Any, grid: Sequence[int], *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin [S, E / 2] for `grid` = (frames, rows, columns) of patches: latent sizes divided by patch_size."""
    return video_rope_tables(read(config, "attention_head_dim"), grid, device=device, dtype=dtype)


def wan_args(config: Any, family: str, **fields: Any) -> BlockArgs:
    """What both namings share; the norms before attention and MLP have no weights, the modulation does their work."""
    shared = {
        "style": "wan", "num_kv_heads": fields["num_heads"], "ffn_dim": read(config, "ffn_dim"),
        "qk_norm": "full", "bias": True, "causal": False,
        "eps": read(config, "eps", 1e-6), "rope": "interleaved", "norm": "layer", "norm_affine": False,
        "modulation": True, "cross_attention": True,
    }  # fmt: skip
    return build(family, **shared | fields)


def wan_keys(family: str, names: Names, *, num_layers: int, width: int, outside: tuple[str, ...]) -> KeyMap:
    """q | k | v are packed in self-attention, k | v in cross-attention."""
    sources: dict[str, Source] = {}
    for i in range(num_layers):
        sources |= _block(f"layers.{i}", f"blocks.{i}", names, width)
    return KeyMap(family, sources, outside=outside)


def _block(ours: str, theirs: str, names: Names, width: int) -> Mapping[str, Source]:
    attention, cross = f"{theirs}.{names.attention}", f"{theirs}.{names.cross_attention}"
    qkv, cross_qkv = ([f"{owner}.{name}" for name in names.qkv] for owner in (attention, cross))
    sources = {f"{ours}.modulation.table": Source((f"{theirs}.{names.modulation}",))}
    sources |= linear(f"{ours}.attention.wqkv", qkv, rows=(width,) * 3, bias=True)
    sources |= linear(f"{ours}.attention.wo", (f"{attention}.{names.out}",), bias=True)
    sources |= linear(f"{ours}.cross_norm", (f"{theirs}.{names.cross_norm}",), bias=True)
    sources |= linear(f"{ours}.cross_attention.wq", cross_qkv[:1], bias=True)
    sources |= linear(f"{ours}.cross_attention.wkv", cross_qkv[1:], rows=(width,) * 2, bias=True)
    sources |= linear(f"{ours}.cross_attention.wo", (f"{cross}.{names.out}",), bias=True)
    for q_or_k in "qk":
        sources[f"{ours}.attention.qk_norm.{q_or_k}_norm.weight"] = Source((f"{attention}.norm_{q_or_k}.weight",))
        sources[f"{ours}.cross_attention.{q_or_k}_norm.weight"] = Source((f"{cross}.norm_{q_or_k}.weight",))
    sources |= linear(f"{ours}.mlp.up", (f"{theirs}.{names.up}",), bias=True)
    return sources | linear(f"{ours}.mlp.down", (f"{theirs}.{names.down}",), bias=True)
