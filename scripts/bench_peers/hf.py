"""The context of a program -> Llama or Qwen3 of transformers, made from a config, under the plan that they bring.

Norms per head make it Qwen3. It has the block's own weights; the final norm, which the block has not, is left out.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from plain import check_plain, plain_state
from torch import Tensor, nn
from transformers.distributed.configuration_utils import DistributedConfig

from tpcompile.bench.contract import BenchContext, Program
from tpcompile.config import BlockConfig
from tpcompile.errors import ConfigError

_NAMES = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip


class FromEmbeddings(nn.Module):
    """The model's layers, from embeddings to the last hidden state; RoPE tables are the model's own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.model(inputs_embeds=x_BSD, use_cache=False).last_hidden_state


def transformers_tp(context: BenchContext) -> Program:
    """The model under `tp_plan="auto"`; no gradient of a parameter is compared. Raises ConfigError for other blocks."""
    block = context.config.block
    _check(block, context.world_size)
    family = "Qwen3" if block.qk_norm == "per_head" else "Llama"
    config = getattr(transformers, f"{family}Config")(
        hidden_size=block.dim,
        intermediate_size=block.ffn_dim,
        num_hidden_layers=block.num_layers,
        num_attention_heads=block.num_heads,
        num_key_value_heads=block.num_kv_heads,
        head_dim=block.head_dim,
        vocab_size=8 * context.world_size,
        max_position_embeddings=block.seq_len,
        rms_norm_eps=block.eps,
    )
    model = getattr(transformers, f"{family}Model")(config).to(context.device, context.dtype)
    model.norm = nn.Identity()
    _load(model, context)
    settings, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=context.world_size))
    model = model.maybe_distribute_model(model, settings, mesh)
    notes = (f"{family} of transformers {transformers.__version__}",)
    return Program(program=FromEmbeddings(model), inputs=context.inputs[:1], notes=notes)


def _check(block: BlockConfig, tp: int) -> None:
    """Raises ConfigError for a block that neither of them is."""
    check_plain(block, tp)
    is_llama = block.style == "llama" and block.causal and not block.bias and block.rope == "half"
    if not is_llama or block.qk_norm == "full":
        raise ConfigError("its Llama and Qwen3 have no such block; llama8b is one")


def _load(model: Any, context: BenchContext) -> None:
    parameters = {name: one for name, one in model.named_parameters() if name.startswith("layers.")}
    with torch.no_grad():
        for name, full in context.weights.items():
            for own, part in plain_state({name: full}, context.config.block).items():
                parameters.pop(_renamed(own)).copy_(part)
    assert not parameters, f"without a value: {sorted(parameters)}"


def _renamed(name: str) -> str:
    """`layers.0.attention.wq.weight` -> `layers.0.self_attn.q_proj.weight`."""
    layers, number, own = name.split(".", 2)
    module, _, kind = own.rpartition(".")
    return f"{layers}.{number}.{_NAMES[module]}.{kind}"
