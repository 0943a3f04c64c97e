"""`generate` of transformers with `tp_plan="auto"` and a static cache, whose decoding step is compiled.

torchrun --standalone --nproc-per-node 2 tests/clients/generate/program.py [rank_seeded_sampling | local_disconnect]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import CompileConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList, set_seed

from tests.clients.llama import CONFIG, load_sharded
from tests.clients.watched import BACKEND, watched

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
NUM_REQUESTS, NUM_NEW = 4, 12


class Disconnected(StoppingCriteria):
    """Stops when the client of a request has gone; rank 0 has the connection."""

    def __init__(self, request: int) -> None:
        self.request, self.num_tokens = request, 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **more: Any) -> Tensor:
        """One flag for each sequence."""
        self.num_tokens += 1
        has_gone = FAULT == "local_disconnect" and self.request == 1 and self.num_tokens == 3
        if has_gone and dist.get_rank() == 0:  # fault: local_disconnect
            return torch.ones(len(input_ids), dtype=torch.bool)  # fault: local_disconnect
        return torch.zeros(len(input_ids), dtype=torch.bool)


def main() -> None:
    """Answer requests under the tool."""
    dist.init_process_group("gloo")
    model = load_sharded()
    compile_config = CompileConfig(fullgraph=True, backend=BACKEND)
    compile_config._compile_all_devices = True  # on a GPU it is compiled anyway
    config = GenerationConfig(
        do_sample=True, temperature=2.0, max_new_tokens=NUM_NEW, cache_implementation="static",
        compile_config=compile_config, pad_token_id=CONFIG.pad_token_id, eos_token_id=list(range(2, 12)),
    )  # fmt: skip
    seed = dist.get_rank() if FAULT == "rank_seeded_sampling" else 0  # fault: rank_seeded_sampling
    set_seed(seed)  # fault: rank_seeded_sampling
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    prompt_BS = torch.arange(12, 20)[None]
    with watched(mesh):
        for request in range(NUM_REQUESTS):
            stopping = StoppingCriteriaList([Disconnected(request)])
            found = model.generate(prompt_BS, generation_config=config, stopping_criteria=stopping)
            print(f"rank {dist.get_rank()} request {request}: {found.shape[1] - prompt_BS.shape[1]} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
