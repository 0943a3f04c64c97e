"""Dense Qwen3 checkpoints in the naming of transformers (Qwen3ForCausalLM) <-> `tpcompile.nn.causal_lm.CausalLM`."""

from __future__ import annotations

from typing import Any

from examples.checkpoints.fields import read, refuse_others
from examples.checkpoints.keymap import KeyMap
from examples.checkpoints.llama import decoder_args, decoder_keys, rope_tables
from tpcompile.block_args import BlockArgs
from tpcompile.errors import ConfigError

__all__ = ["block_args", "key_map", "rope_tables"]

_FAMILY = "Qwen3"
_SUPPORTED = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "attention_dropout": (0.0, None),
    "quantization_config": (None,),
}


def block_args(config: Any, *, dtype: str = "float32", **options: Any) -> BlockArgs:
    """BlockArgs of a Qwen3Config or the dict in its config.json; `options` are further fields, e.g. uneven="pad".

    q and k are normalised per head. Raises ConfigError naming what is not supported: mixture of experts, a sliding
    window, biases (Qwen3 has them in attention only), dropout inside attention, quantised weights.
    """
    _check(config)
    return decoder_args(config, _FAMILY, qk_norm="per_head", bias=False, dtype=dtype, **options)


def key_map(config: Any) -> KeyMap:
    """Names and packing for this config. Raises ConfigError as `block_args`."""
    _check(config)
    return decoder_keys(config, _FAMILY, bias=False, qk_norm=True)


def _check(config: Any) -> None:
    refuse_others(config, _FAMILY, _SUPPORTED)
    kinds = set(read(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise ConfigError(f"this {_FAMILY} checkpoint is not supported: layer_types has {sorted(kinds)}")
