"""Mixtral of transformers under its own tensor-parallel plan, experts; inference."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.faults.drawn import frame, models

# place: file


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
    model = Scored(models.of_transformers("Mixtral", job, num_local_experts=6, num_experts_per_tok=2), job.group)
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
