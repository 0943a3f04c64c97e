"""Qwen3 of transformers under its own tensor-parallel plan, norms of queries and keys; inference."""

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.distributed.configuration_utils import DistributedConfig

from tests.faults.drawn import frame

# place: file

SIZES = dict(
    hidden_size=48,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=6,
    vocab_size=96,
    max_position_embeddings=64,
    head_dim=8,
)


def distributed(model: nn.Module, tp: int) -> nn.Module:
    """What from_pretrained(..., tp_plan="auto") does to a model, without a checkpoint."""
    settings, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=tp))
    return model.maybe_distribute_model(model, settings, mesh)


class Scored(nn.Module):
    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.model = model
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:  # tag: entered
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state  # tag: entered
        # place: region x=hidden module=self group=self.group
        logits = self.model.lm_head(hidden)
        # place: region x=logits module=self group=self.group
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    job = frame.start()
    # place: setup
    whole = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).to(job.device)
    model = Scored(distributed(whole, job.tp), job.group)
    # place: built model=model layers=model.model.model.layers
    compiled = torch.compile(model, backend=job.backend)  # site: compile
    # place: compiled model=model layers=model.model.model.layers
    with job.watching(), torch.no_grad():
        for step in range(job.num_steps):
            torch.manual_seed(step)
            ids = torch.randint(96, (4, 12), device=job.device)
            # place: loop x=ids batch=ids half=ids model=model
            loss = compiled(ids)  # site: call
            print(f"step {step}: loss {loss.item():.4f}")
            # place: called model=model again=compiled(ids)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
