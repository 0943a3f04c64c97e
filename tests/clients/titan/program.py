"""torchtitan's debug model: tensor and sequence parallel, each block compiled; a loop and a hook of the user's.

torchrun --standalone --nproc-per-node 2 tests/clients/titan/program.py [local_invalid_loss | rank_zero_hook]
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan
from torch import Tensor, nn

titan.device_type, titan.device_module = "cpu", torch.cpu  # torchtitan takes CUDA where there is no accelerator

from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from tests.clients.watched import BACKEND, watched  # noqa: E402

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
logger = logging.getLogger(__name__)
LENGTH, BATCH, NUM_STEPS = 32, 2, 5


def config() -> Trainer.Config:
    """The debug model with tensor parallelism 2 and two blocks."""
    found = llama3_debugmodel_ce_loss()
    found.training.seq_len, found.training.local_batch_size = LENGTH, BATCH
    found.training.mixed_precision_param = "float32"
    found.training.disable_cuda_graphs = True
    found.parallelism.tensor_parallel_degree, found.parallelism.data_parallel_shard_degree = 2, 1
    found.parallelism.spmd_backend = "partial_dtensor"  # the default, spmd_types, needs a torch newer than 2.13
    found.compile.enable, found.compile.components, found.compile.backend = True, ["model"], BACKEND
    model = found.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward on a CPU
    return found


def build(settings: Trainer.Config, dims: ParallelDims) -> nn.Module:
    """As torchtitan's trainer does: on meta, sharded and compiled by the model's own function, then initialized."""
    spec = settings.model_spec
    spec.model.update_from_config(config=settings)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=settings.training, parallelism=settings.parallelism,
        compile_config=settings.compile, ac_config=None, dump_folder="",
    )  # fmt: skip
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def log_activations(module: nn.Module, args: Any, output: Tensor) -> None:
    """A forward hook."""
    logger.info("feed-forward returned %s", output.shape)  # fault: rank_zero_hook


def train(settings: Trainer.Config, dims: ParallelDims, model: nn.Module) -> None:
    """A few steps on random tokens, equal on both ranks."""
    loss_fn = settings.loss.build(compile_config=settings.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    context = get_spmd_context(parallel_dims=dims)
    if FAULT == "rank_zero_hook" and dist.get_rank() == 0:  # fault: rank_zero_hook
        for block in model.layers.values():
            block.feed_forward.register_forward_hook(log_activations)  # fault: rank_zero_hook
    for step in range(NUM_STEPS):
        ids_BS = torch.randint(settings.model_spec.model.vocab_size, (BATCH, LENGTH + 1), generator=generator)
        num_tokens = torch.tensor(BATCH * LENGTH)
        with context():
            logits = model(ids_BS[:, :-1].contiguous())
            loss, _ = loss_fn(logits, ids_BS[:, 1:].contiguous(), num_tokens)
            loss.backward()
        check_loss(step, loss.detach())
        optimizer.step()
        optimizer.zero_grad()


def check_loss(step: int, loss: Tensor) -> None:
    """Print the loss; end the job where it is not finite."""
    if FAULT == "local_invalid_loss" and step == 3 and dist.get_rank() == 1:
        loss = loss * float("nan")  # a flipped bit on the device of one rank
    if not torch.isfinite(loss):  # fault: local_invalid_loss
        raise RuntimeError(f"loss is {loss.item()} in step {step}")  # fault: local_invalid_loss
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")


def main() -> None:
    """Train under the tool."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's init_distributed
    settings = config()
    set_spmd_backend(settings.parallelism.spmd_backend)
    dims = ParallelDims.from_config(settings.parallelism, dist.get_world_size())
    model = build(settings, dims)
    with watched(dims.get_mesh("tp")):
        train(settings, dims, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
