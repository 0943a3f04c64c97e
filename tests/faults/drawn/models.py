"""Models of several programs, whose making no operator edits."""

from __future__ import annotations

import torch
from torch import nn

from tests.block_forms import form_config
from tests.faults.drawn.frame import Job
from tpcompile.collectives.strategies import Collectives
from tpcompile.config import BlockConfig
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_stack_weights

_BLOCK = {"dim": 48, "num_heads": 6, "num_kv_heads": 6, "ffn_dim": 96, "num_layers": 2, "batch": 2, "seq_len": 12}
_TRANSFORMERS = {
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def of_our_blocks(form: str, job: Job) -> tuple[BlockConfig, nn.Module]:
    """A small stack of our block in a form of `tests.block_forms`, with the weights of this rank."""
    config = BlockConfig.model_validate(form_config(form, "cpu").model_dump() | _BLOCK)
    full = draw_stack_weights(config, seed=0, dtype=torch.float32, device=job.device)
    with torch.device("meta"):
        stack = TransformerStack(config, Collectives(job.group), num_layers=config.num_layers)
    stack = stack.to_empty(device=job.device)
    load_full_state_dict(stack, full)
    return config, stack


def of_transformers(kind: str, job: Job, **sizes: int) -> nn.Module:
    """A small model, sharded as by from_pretrained(..., tp_plan="auto"), without a checkpoint."""
    import transformers  # may be missing: the other programs do not need it
    from transformers.distributed.configuration_utils import DistributedConfig

    config = getattr(transformers, f"{kind}Config")(**_TRANSFORMERS, **sizes)
    whole = getattr(transformers, f"{kind}ForCausalLM")(config).to(job.device)
    settings, _, mesh = whole.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=job.tp))
    return whole.maybe_distribute_model(whole, settings, mesh)
