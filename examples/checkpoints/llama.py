"""Llama checkpoints in the naming of transformers (LlamaForCausalLM) <-> `tpcompile.nn.causal_lm.CausalLM`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from examples.checkpoints.fields import build, read, refuse_others
from examples.checkpoints.keymap import KeyMap, Source, linear
from tpcompile.block_args import BlockArgs
from tpcompile.errors import ConfigError
from tpcompile.nn.rope import frequencies, llama3_frequencies, tables_of

_FAMILY = "Llama"
_SUPPORTED = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_dropout": (0.0, None),
    "quantization_config": (None,),
}
_DERIVED = (".rotary_emb.inv_freq",)


def block_args(config: Any, *, dtype: str = "float32", **options: Any) -> BlockArgs:
    """BlockArgs of a LlamaConfig or the dict in its config.json; `options` are further fields, e.g. uneven="pad".

    Raises ConfigError naming what is not supported: an activation that is not silu, dropout inside attention, quantised
    weights, and biases in attention but not in the MLP or the other way round. RoPE is not part of it: see
    `rope_tables`. When training, note that transformers gives the embedding's row `pad_token_id` no gradient; we do.
    """
    _check(config)
    return decoder_args(
        config, _FAMILY, qk_norm="none", bias=bool(read(config, "attention_bias", False)), dtype=dtype, **options,
    )  # fmt: skip


def key_map(config: Any) -> KeyMap:
    """Names and packing for this config. Raises ConfigError as `block_args`."""
    _check(config)
    return decoder_keys(config, _FAMILY, bias=bool(read(config, "attention_bias", False)), qk_norm=False)


def rope_tables(
    config: Any, seq_len: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin [S, E / 2] for rope types "default", "linear" and "llama3".

    Raises ConfigError for the others: the model takes tables as inputs, so compute those yourself and pass them.
    """
    options, base = _rope_options(config)
    kind = options.get("rope_type", options.get("type", "default"))
    partial = options.get("partial_rotary_factor", read(config, "partial_rotary_factor", None)) or 1.0
    if kind not in ("default", "linear", "llama3") or partial != 1:
        raise ConfigError(
            f"no RoPE tables for rope_type={kind!r} with partial_rotary_factor={partial}; supported are default, "
            "linear and llama3 of the whole head; compute other tables yourself and pass them to the model"
        )
    frequencies_R = frequencies(head_dim(config), base=base, device=device)
    if kind == "linear":
        frequencies_R = frequencies_R / options["factor"]
    elif kind == "llama3":
        frequencies_R = llama3_frequencies(
            frequencies_R, factor=options["factor"], low_freq_factor=options["low_freq_factor"],
            high_freq_factor=options["high_freq_factor"], original_len=options["original_max_position_embeddings"],
        )  # fmt: skip
    return tables_of(frequencies_R, seq_len, dtype=dtype)


def decoder_args(config: Any, family: str, **fields: Any) -> BlockArgs:
    """What Llama and Qwen3 share: SwiGLU, RMSNorm before each half, causal grouped-query attention with "half" RoPE."""
    shared = {
        "style": "llama", "causal": True, "norm": "rms", "rope": "half",
        "dim": read(config, "hidden_size"), "num_heads": read(config, "num_attention_heads"),
        "num_kv_heads": _num_kv_heads(config), "head_size": head_dim(config),
        "ffn_dim": read(config, "intermediate_size"),
        "eps": read(config, "rms_norm_eps"),
    }  # fmt: skip
    return build(family, **shared | fields)


def decoder_keys(config: Any, family: str, *, bias: bool, qk_norm: bool) -> KeyMap:
    """Names of transformers <-> those of a CausalLM; q | k | v and gate | up are packed."""
    sources = {"embedding.weight": Source(("model.embed_tokens.weight",))}
    for i in range(read(config, "num_hidden_layers")):
        sources |= _layer(f"stack.layers.{i}", f"model.layers.{i}", config, bias=bias, qk_norm=qk_norm)
    sources["norm.weight"] = Source(("model.norm.weight",))
    if read(config, "tie_word_embeddings", False):
        return KeyMap(family, sources, derived=_DERIVED, aliases={"lm_head.weight": "model.embed_tokens.weight"})
    sources["head.weight"] = Source(("lm_head.weight",))
    return KeyMap(family, sources, derived=_DERIVED)


def head_dim(config: Any) -> int:
    """Size of a head, also from configs that leave it out."""
    return read(config, "head_dim", None) or read(config, "hidden_size") // read(config, "num_attention_heads")


def _layer(ours: str, theirs: str, config: Any, *, bias: bool, qk_norm: bool) -> dict[str, Source]:
    size, ffn = head_dim(config), read(config, "intermediate_size")
    q_rows, kv_rows = read(config, "num_attention_heads") * size, _num_kv_heads(config) * size
    attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    qkv = [f"{attention}.{name}_proj" for name in "qkv"]
    sources = {f"{ours}.attention_norm.weight": Source((f"{theirs}.input_layernorm.weight",))}
    sources |= linear(f"{ours}.attention.wqkv", qkv, rows=(q_rows, kv_rows, kv_rows), bias=bias)
    if qk_norm:
        for name in ("q_norm", "k_norm"):
            sources[f"{ours}.attention.qk_norm.{name}.weight"] = Source((f"{attention}.{name}.weight",))
    sources |= linear(f"{ours}.attention.wo", (f"{attention}.o_proj",), bias=bias)
    sources[f"{ours}.mlp_norm.weight"] = Source((f"{theirs}.post_attention_layernorm.weight",))
    sources |= linear(f"{ours}.mlp.gate_up", (f"{mlp}.gate_proj", f"{mlp}.up_proj"), rows=(ffn, ffn), bias=bias)
    return sources | linear(f"{ours}.mlp.down", (f"{mlp}.down_proj",), bias=bias)


def _check(config: Any) -> None:
    refuse_others(config, _FAMILY, _SUPPORTED)
    attention, mlp = bool(read(config, "attention_bias", False)), bool(read(config, "mlp_bias", False))
    if attention != mlp:
        raise ConfigError(
            f"this Llama checkpoint is not supported: attention_bias={attention} with mlp_bias={mlp}; our block has "
            "biases on all linears or on none"
        )


def _num_kv_heads(config: Any) -> int:
    return read(config, "num_key_value_heads", None) or read(config, "num_attention_heads")


def _rope_options(config: Any) -> tuple[dict[str, Any], float]:
    """RoPE fields and base: `rope_parameters` since transformers 5, before it `rope_theta` and `rope_scaling`."""
    options = dict(read(config, "rope_parameters", None) or read(config, "rope_scaling", None) or {})
    return options, options.get("rope_theta") or read(config, "rope_theta", None) or 10000.0
