"""Wan 2.1 text-to-video blocks in the naming of the original release (WanModel) <-> `TransformerStack`.

As `wan`: the stack is `model.blocks`, keys of the rest are left alone. Note that the release calls the norm before
cross-attention norm3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from examples.checkpoints.fields import read, refuse_others
from examples.checkpoints.keymap import KeyMap
from examples.checkpoints.wan import Names, wan_args, wan_keys
from tpcompile.block_args import BlockArgs
from tpcompile.nn.rope import video_rope_tables

_FAMILY = "Wan 2.1 (original release)"
_SUPPORTED = {
    "_class_name": ("WanModel",),
    "model_type": ("t2v",),
    "qk_norm": (True,),
    "cross_attn_norm": (True,),
    "window_size": ((-1, -1), [-1, -1]),
}
_OUTSIDE = ("patch_embedding.", "text_embedding.", "time_embedding.", "time_projection.", "head.")
_NAMES = Names(
    attention="self_attn", cross_attention="cross_attn", qkv=("q", "k", "v"), out="o", cross_norm="norm3",
    up="ffn.0", down="ffn.2", modulation="modulation",
)  # fmt: skip


def block_args(config: Any, *, dtype: str = "float32", **options: Any) -> BlockArgs:
    """BlockArgs of a WanModel's config.json; `options` are further fields.

    Raises ConfigError naming what is not supported: models that are not t2v, windows, missing norms.
    """
    refuse_others(config, _FAMILY, _SUPPORTED)
    dim, heads = read(config, "dim"), read(config, "num_heads")
    return wan_args(config, _FAMILY, dim=dim, num_heads=heads, dtype=dtype, **options)


def key_map(config: Any) -> KeyMap:
    """Names and packing for this config. Raises ConfigError as `block_args`."""
    refuse_others(config, _FAMILY, _SUPPORTED)
    num_layers, width = read(config, "num_layers"), read(config, "dim")
    return wan_keys(_FAMILY, _NAMES, num_layers=num_layers, width=width, outside=_OUTSIDE)


def rope_tables(
    config: Any, grid: Sequence[int], *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin [S, E / 2] for `grid` = (frames, rows, columns) of patches."""
    head_dim = read(config, "dim") // read(config, "num_heads")
    return video_rope_tables(head_dim, grid, device=device, dtype=dtype)
