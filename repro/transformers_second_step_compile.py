"""Upstream: with the style `replicated_with_grad_allreduce` of transformers, the second step compiles the model again.

    torchrun --standalone --nproc-per-node 2 repro/transformers_second_step_compile.py

Under `tp_plan="auto"` the norms of queries and keys of Qwen3 are replicated, and transformers registers the hooks that
reduce their gradients in the first forward (`ReplicatedWithGradAllReduce`). The registration changes the module's
dictionary, which Dynamo guards (`not ___dict_contains('weight', ...)`), so the guards of the first compile fail at the
second call: twice the compile time, on all ranks alike. Llama, which has no such norms, is compiled once. Seen with
transformers 5.24.0, torch 2.13.0 on CPU; torch 2.11.0 compiles it once. No upstream issue was found. What helps: an
eager step before `torch.compile`.

Prints how many graphs each step compiled; exit status 1 when the second step of Qwen3 compiles one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip


def graphs_per_step(family: str, *, steps: int = 3, eager_first: bool = False) -> list[int]:
    """How many graphs are compiled in each training step."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES))
    settings, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size()))
    model = model.maybe_distribute_model(model, settings, mesh)
    ids = torch.randint(SIZES["vocab_size"], (2, 12))
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    def step(program: Any) -> int:
        before = len(compiled)
        program(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return len(compiled) - before

    if eager_first:
        step(model)
    program = torch.compile(model, backend=backend)
    return [step(program) for _ in range(steps)]


def main() -> int:
    """Llama, Qwen3, and Qwen3 after an eager step."""
    dist.init_process_group("gloo")
    found = {
        "Llama": graphs_per_step("Llama"),
        "Qwen3": graphs_per_step("Qwen3"),
        "Qwen3 after an eager step": graphs_per_step("Qwen3", eager_first=True),
    }
    if dist.get_rank() == 0:
        for name, counts in found.items():
            print(f"{name}: graphs compiled in steps 1, 2, 3: {counts}")
    dist.destroy_process_group()
    return int(found["Qwen3"][1] > 0)


if __name__ == "__main__":
    sys.exit(main())
