"""Upstream bug: transformers reduces accumulated gradients again, with the style `replicated_with_grad_allreduce`.

    torchrun --standalone --nproc-per-node 2 repro/transformers_norm_grad_accumulation.py

Under `tp_plan="auto"` the norms of queries and keys of Qwen3 are replicated, and each rank has the gradient of its own
heads. transformers sums it over the ranks in a hook that runs after `param.grad` was accumulated
(`ReplicatedWithGradAllReduce`), so a second `backward()` before `zero_grad()` sums what was summed already: the first
gradient counts as many times as there are ranks. Silent, equal on all ranks, in eager as in compiled. Seen with
transformers 5.23.0, torch 2.13.0 on CPU; no upstream issue was found. What helps: `zero_grad()` before every backward.

Prints the error of the gradients after one and after two backward passes; exit status 1 when transformers is wrong.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip


def errors(*, num_backward: int, family: str = "Qwen3") -> dict[str, float]:
    """Parameter -> error of its gradient against one device, relative to the largest element."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES))
    ids = torch.randint(SIZES["vocab_size"], (2, 12))
    alone = copy.deepcopy(model)
    settings, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size()))
    model = model.maybe_distribute_model(model, settings, mesh)
    for _ in range(num_backward):
        for one in (model, alone):
            one(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found, expected = _gradients(model), _gradients(alone)
    return {name: float((found[name] - g).abs().max() / g.abs().max()) for name, g in expected.items()}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def main() -> int:
    """One and two backward passes."""
    dist.init_process_group("gloo")
    worst = {}
    for num_backward in (1, 2):
        found = errors(num_backward=num_backward)
        worst[num_backward] = max(found.items(), key=lambda pair: pair[1])
    if dist.get_rank() == 0:
        for num_backward, (name, error) in worst.items():
            print(f"{num_backward} backward passes: largest error {error:.2g}, in {name}")
    dist.destroy_process_group()
    return int(max(error for _, error in worst.values()) > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
