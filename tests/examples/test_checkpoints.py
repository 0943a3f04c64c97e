"""Checkpoint key maps: packing, what is missing, unknown or left alone, and the configs that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.checkpoints import KeyMap, llama, num_layers, qwen3, wan, wan_original
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.nn.causal_lm import CausalLM
from tpcompile.nn.sharding import specs_of

LLAMA = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 10, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4,
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 4}
WAN = {"num_attention_heads": 4, "attention_head_dim": 14, "ffn_dim": 36, "num_layers": 2}
ORIGINAL = {"_class_name": "WanModel", "model_type": "t2v", "dim": 56, "ffn_dim": 36, "num_heads": 4, "num_layers": 2}


def _state(key_map: KeyMap, model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint of different numbers in every element."""
    specs, parameters = specs_of(model), dict(model.named_parameters())
    full, start = {}, 0
    for name in specs:
        size = parameters[name].numel()
        full[name] = torch.arange(start, start + size, dtype=torch.float32).view(parameters[name].shape)
        start += size
    return key_map.to_checkpoint(full)


def _llama(config: dict[str, Any] = LLAMA) -> tuple[KeyMap, dict[str, Tensor]]:
    family = llama if config["model_type"] == "llama" else qwen3
    args = family.block_args(config)
    tied = config.get("tie_word_embeddings", False)
    with torch.device("meta"):
        model = CausalLM(
            args, Collectives(None), num_layers=num_layers(config), vocab_size=config["vocab_size"], tied=tied
        )
    return family.key_map(config), _state(family.key_map(config), model)


@pytest.mark.parametrize(
    "config",
    [LLAMA, LLAMA | {"tie_word_embeddings": True}, LLAMA | {"attention_bias": True, "mlp_bias": True}, QWEN3],
)
def test_packing_and_unpacking_is_the_identity_on_every_element(config: dict[str, Any]) -> None:
    key_map, state = _llama(config)
    again = key_map.to_checkpoint(key_map.to_full(state))
    assert again.keys() == state.keys() and all(torch.equal(again[key], state[key]) for key in state)
    prefix = "model.layers.1.self_attn"
    rows = [state[f"{prefix}.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(key_map.to_full(state)["stack.layers.1.attention.wqkv.weight"], torch.cat(rows))


def test_missing_and_unknown_keys_are_named_at_once() -> None:
    key_map, state = _llama()
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.self_attn.sinks"] = torch.ones(4)
    with pytest.raises(ConfigError, match=r"missing \['model.layers.1.mlp.up_proj.weight'\].*unknown.*sinks"):
        key_map.to_full(state)
    with pytest.raises(ConfigError, match=r"missing \['embedding.weight'.* \['bogus'\]"):
        key_map.to_checkpoint({"bogus": torch.ones(1)})


def test_keys_without_weights_and_of_parts_that_are_not_ours_are_left_alone() -> None:
    key_map, state = _llama()
    old = state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert len(key_map.to_full(old)) == len(key_map.to_full(state))
    with pytest.raises(ConfigError, match=r"unknown \['blocks.0.attn2.add_k_proj.bias', 'vace_blocks.0.x'\]"):
        blocks = {key: torch.ones(1) for s in wan.key_map(WAN).sources.values() for key in s.keys}
        extra = {"patch_embedding.bias": 0, "blocks.0.attn2.add_k_proj.bias": 0, "vace_blocks.0.x": 0}
        wan.key_map(WAN).to_full(blocks | {key: torch.ones(1) for key in extra})


def test_parts_whose_wrong_sizes_add_up_are_refused() -> None:
    key_map, state = _llama()
    q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    state[q], state[k] = state[q][:6], torch.cat((state[k], state[q][6:]))
    full = key_map.to_full(state)
    with pytest.raises(ConfigError, match=r"q_proj.weight is \[6, 8\].*expected \[8, 8\]"):
        full["stack.layers.0.attention.wqkv.weight"]


def test_parts_of_two_dtypes_are_refused_unless_cast() -> None:
    key_map, state = _llama()
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].double()
    with pytest.raises(ConfigError, match=r"up_proj.weight .*float64, .*float32 .*gate_proj"):
        key_map.to_full(state)["stack.layers.0.mlp.gate_up.weight"]
    _, state = _llama()
    assert {t.dtype for t in key_map.to_full(state, dtype=torch.bfloat16).values()} == {torch.bfloat16}


def test_a_tied_head_may_be_absent_or_equal_but_not_different() -> None:
    key_map, state = _llama(LLAMA | {"tie_word_embeddings": True})
    assert "lm_head.weight" not in state and "head.weight" not in key_map.to_full(state)
    table = state["model.embed_tokens.weight"]
    assert "head.weight" not in key_map.to_full(state | {"lm_head.weight": table.clone()})
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs .*model\.embed_tokens\.weight"):
        key_map.to_full(state | {"lm_head.weight": table + 1})


class Counting(dict[str, Tensor]):
    """Counts what is read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: list[str] = []

    def __getitem__(self, key: str) -> Tensor:
        self.read.append(key)
        return super().__getitem__(key)


def test_tensors_are_read_when_their_parameter_is_asked_for() -> None:
    key_map, plain = _llama()
    state = Counting(plain)
    full = key_map.to_full(state)
    assert state.read == []
    full["stack.layers.0.mlp.gate_up.weight"]
    assert state.read == ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]


REFUSED = [
    (llama, LLAMA | {"attention_bias": True}, "attention_bias=True with mlp_bias=False"),
    (llama, LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu' .supported: 'silu'"),
    (llama, LLAMA | {"model_type": "qwen3_moe"}, "model_type='qwen3_moe'"),
    (llama, LLAMA | {"attention_dropout": 0.1, "quantization_config": {}}, "attention_dropout=0.1.*; quantization"),
    (qwen3, QWEN3 | {"model_type": "qwen3_moe"}, "model_type='qwen3_moe' .supported: 'qwen3'"),
    (qwen3, QWEN3 | {"use_sliding_window": True}, "use_sliding_window=True"),
    (qwen3, QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has .'sliding_attention'"),
    (qwen3, QWEN3 | {"attention_bias": True}, "attention_bias=True"),
    (wan, WAN | {"added_kv_proj_dim": 56, "image_dim": 8}, "added_kv_proj_dim=56.*image_dim=8"),
    (wan, WAN | {"cross_attn_norm": False}, "cross_attn_norm=False"),
    (wan, WAN | {"qk_norm": None}, "qk_norm=None"),
    (wan_original, ORIGINAL | {"model_type": "i2v"}, "model_type='i2v'"),
    (wan_original, ORIGINAL | {"window_size": (8, 8)}, "window_size=.8, 8."),
]


@pytest.mark.parametrize(("family", "config", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(family: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        family.block_args(config)
    with pytest.raises(ConfigError, match=message):
        family.key_map(config)


def test_a_config_without_a_needed_field_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no 'hidden_size'"):
        llama.block_args({k: v for k, v in LLAMA.items() if k != "hidden_size"})
    with pytest.raises(ConfigError, match=r"Llama: .*num_heads=4 .*num_kv_heads=3"):
        llama.block_args(LLAMA | {"num_key_value_heads": 3})
