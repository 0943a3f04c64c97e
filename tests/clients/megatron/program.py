"""megatron-core: a GPT with tensor parallelism 2, each layer compiled, and a loop over micro-batches.

Its schedules make a tensor on CUDA, so the loop is the client's own.

torchrun --standalone --nproc-per-node 2 tests/clients/megatron/program.py [local_microbatches | first_rank_metric]
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.clients.watched import BACKEND, watched

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WIDTH, LENGTH, BATCH, VOCABULARY = 32, 16, 2, 64
NUM_STEPS, NUM_MICROBATCHES = 6, 2
torch.cuda.current_device = lambda: "cpu"  # where megatron-core makes its buffers
# Its parallel layers warn on rank 0 inside compiled code, and the graph breaks there, unless the warning is ignored; a
# guard on the module `warnings` stays: repro/megatron_warning_on_rank_zero.py
torch._dynamo.config.ignore_logging_functions.add(warnings.warn)
WARNS = [("guards", "__import_megatron_dot_core_dot_utils", "the branch of rank 0 that warns")]


def build() -> GPTModel:
    """A GPT of two layers on the CPU, compiled layer by layer."""
    config = TransformerConfig(
        num_layers=2, hidden_size=WIDTH, num_attention_heads=4, tensor_model_parallel_size=2, hidden_dropout=0.0,
        attention_dropout=0.0, gradient_accumulation_fusion=False, use_cpu_initialization=True,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    for layer in model.decoder.layers:
        layer.compile(backend=BACKEND)
    return model


def microbatches(step: int) -> list[Tensor]:
    """The micro-batches of a step, packed by the number of tokens that fit: all ranks of a group need the same."""
    generator = torch.Generator().manual_seed(step)
    found = [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(NUM_MICROBATCHES)]
    if FAULT == "local_microbatches" and step == 3 and dist.get_rank() == 1:
        found.pop()  # fault: local_microbatches
    return found


def forward_step(model: GPTModel, ids_BS: Tensor) -> Tensor:
    """Mean loss of a micro-batch."""
    tokens_BS, labels_BS = ids_BS[:, :-1], ids_BS[:, 1:]
    positions_BS = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask_SS = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    return model(tokens_BS, positions_BS, mask_SS, labels=labels_BS).mean()


def log(step: int, losses: list[Tensor]) -> None:
    """Print the loss, averaged over the tensor-parallel group."""
    mean = torch.stack(losses).mean()
    group = parallel_state.get_tensor_model_parallel_group()
    is_first = dist.get_rank(group) == 0
    if FAULT == "first_rank_metric":
        if is_first and step == 3:  # fault: first_rank_metric
            dist.all_reduce(mean, group=group)  # fault: first_rank_metric
    else:
        dist.all_reduce(mean, group=group)
    if is_first:
        print(f"step {step}: loss {mean.item() / 2:.4f}")


def train(model: nn.Module) -> None:
    """A few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = []
        for ids_BS in microbatches(step):  # fault: local_microbatches
            loss = forward_step(model, ids_BS)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        log(step, losses)


def main() -> None:
    """Train under the tool."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(0)
    initialize_rng_tracker(inference_rng_tracker=True)  # the other one keeps states of CUDA
    model = build()
    mesh = DeviceMesh.from_group(parallel_state.get_tensor_model_parallel_group(), "cpu", mesh_dim_names=("tp",))
    with watched(mesh, allowed=WARNS):
        train(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
