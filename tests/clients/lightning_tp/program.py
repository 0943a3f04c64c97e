"""Lightning with ModelParallelStrategy: a DTensor plan, a compiled model, a callback and metrics of the user's.

torchrun --standalone --nproc-per-node 2 tests/clients/lightning_tp/program.py [rank_zero_log | rank_zero_full_tensor]
"""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.watched import BACKEND, watched

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WIDTH, NUM_STEPS = 32, 8


class MLP(nn.Module):
    """What is sharded and compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BD: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return self.down(torch.relu(self.up(x_BD)))


class Regression(L.LightningModule):
    """The user's module."""

    def configure_model(self) -> None:
        """Shard and compile, as the guide of ModelParallelStrategy has it."""
        if hasattr(self, "mlp"):
            return
        torch.manual_seed(0)
        self.mlp = MLP()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(self.mlp, self.device_mesh["tensor_parallel"], plan)
        self.mlp.compile(backend=BACKEND)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error of a batch."""
        (x_BD,) = batch
        loss = (self.mlp(x_BD) - x_BD).square().mean()
        is_logged = batch_idx % 3 == 2
        if FAULT == "rank_zero_log" and is_logged:
            if self.trainer.is_global_zero:  # fault: rank_zero_log
                self.log("loss", loss, sync_dist=True)  # fault: rank_zero_log
        elif is_logged:
            self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class WeightNorm(L.Callback):
    """Prints the norm of a weight every few steps."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *more: Any) -> None:
        """After each step."""
        if trainer.global_step % 3:
            return
        if FAULT == "rank_zero_full_tensor":
            if trainer.is_global_zero:  # fault: rank_zero_full_tensor
                print("norm", module.mlp.up.weight.full_tensor().norm().item())  # fault: rank_zero_full_tensor
            return
        norm = module.mlp.up.weight.full_tensor().norm().item()
        if trainer.is_global_zero:
            print("norm", norm)


class Watched(L.Callback):
    """The tool, around the loop: the mesh is there once the strategy has set up the processes."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Begin to watch."""
        self.block = watched(module.device_mesh, axis="tensor_parallel")
        self.block.__enter__()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """The training is over."""
        self.block.__exit__(None, None, None)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """A rank has raised."""
        self.block.__exit__(type(exception), exception, exception.__traceback__)


def main() -> None:
    """Train under the tool."""
    x_ND = torch.randn(4 * NUM_STEPS, WIDTH, generator=torch.Generator().manual_seed(0))
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, callbacks=[WeightNorm(), Watched()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(), DataLoader(TensorDataset(x_ND), batch_size=4))


if __name__ == "__main__":
    main()
