"""A Llama of transformers under its own plan, for `--target tests.gate.own_llama:build`; faults as in own.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.distributed.configuration_utils import DistributedConfig

import tpcompile
from tpcompile.target import TargetContext

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip


class Logits(nn.Module):
    """Tokens -> logits, without the cache."""

    def __init__(self, model: nn.Module, fault: str = "") -> None:
        super().__init__()
        self.model = model
        self.fault = fault

    def forward(self, ids: Tensor) -> Tensor:
        """The logits of every token."""
        x = self.model.get_input_embeddings()(ids)
        if self.fault == "constant":
            x = x * (1.0 + dist.get_rank())  # constant
        if self.fault == "break" and dist.get_rank() == 1:
            print("hidden", x.shape)  # break
        logits: Tensor = self.model(inputs_embeds=x, use_cache=False).logits
        return logits


def build(ctx: TargetContext) -> tpcompile.Target:
    """The model in shards, and the same model whole."""
    fault = ctx.settings.get("fault", "")
    config = transformers.LlamaConfig(**SIZES)
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(config).eval()
    if fault == "layout" and ctx.rank == 1:
        plan = config.base_model_tp_plan
        config.base_model_tp_plan = {name: plan[name] for name in plan if "mlp" not in name}
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(whole.state_dict())
    # What `from_pretrained(..., distributed_config=...)` does to a model that it has loaded.
    settings, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=ctx.world_size))
    model = model.maybe_distribute_model(model, settings, mesh)
    ids = torch.randint(SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(1))
    return tpcompile.Target(program=Logits(model, fault), inputs=(ids,), step=_infer, reference=Logits(whole))


@torch.no_grad()
def _infer(program: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return program(*inputs)
