"""Llama, Qwen3 or Mixtral of transformers under `tp_plan="auto"`, compiled and trained.

torchrun --standalone --nproc-per-node 2 -m examples.adapters.transformers_plan Llama
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.configuration_utils import DistributedConfig

import tpcompile
from examples.adapters.one_device import BACKEND, gradients, print_errors

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
RIGHT_ON_A_SHARD = ("transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward")
"""Custom ops of Mixtral: a matrix product for each expert, of the columns or rows that a rank has."""
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def main(family: str) -> None:
    """Three steps on the same tokens, without an optimizer."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    sizes = SIZES | (EXPERTS if family == "Mixtral" else {})
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    ids = torch.randint(SIZES["vocab_size"], (2, 12))
    alone = copy.deepcopy(model)
    alone(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    # What `from_pretrained(..., distributed_config=...)` does to a model that it has loaded.
    settings, _, hf_mesh = model.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=mesh.size()))
    model = model.maybe_distribute_model(model, settings, hf_mesh)
    compiled = torch.compile(model, backend=BACKEND)

    with tpcompile.capture(mesh, tp_aware=RIGHT_ON_A_SHARD) as run:
        for _step in range(3):
            model.zero_grad()
            found = compiled(input_ids=ids, labels=ids, use_cache=False)
            found.loss.backward()
    tpcompile.check(run).print()

    expected = alone(input_ids=ids, use_cache=False).logits
    print_errors(found.logits, expected, gradients(model), gradients(alone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "Llama")
