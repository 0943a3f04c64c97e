"""A small random Llama of transformers, loaded with `tp_plan="auto"` as users load theirs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from tests.clients.watched import RUN_DIR

CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=64, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def load_sharded() -> PreTrainedModel:
    """Rank 0 writes the checkpoint, all ranks load their shards of it."""
    folder = Path(os.environ[RUN_DIR]).parent / "model"
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).save_pretrained(folder)
    dist.barrier()
    sharded = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=sharded)
