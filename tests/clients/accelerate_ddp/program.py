"""Accelerator with DDP and torch.compile: epochs of training, an evaluation, early stopping.

torchrun --nproc-per-node 2 tests/clients/accelerate_ddp/program.py [main_process_metrics | local_early_stop]
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.watched import BACKEND, watched

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WIDTH, NUM_EPOCHS, LOG_EVERY = 64, 6, 3


class Regressor(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 1)

    def forward(self, x_BD: Tensor) -> Tensor:
        """[B, D] -> [B]."""
        return self.down(torch.relu(self.up(x_BD))).squeeze(-1)


def loaders() -> tuple[DataLoader, DataLoader]:
    """Training and evaluation; every second label of the evaluation is stale, and all of those go to rank 1."""
    x_ND = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    stale_N = torch.tensor([1.0, -1.0]).repeat_interleave(4).repeat(8)
    train = TensorDataset(x_ND, torch.ones(64))
    return DataLoader(train, batch_size=4), DataLoader(TensorDataset(x_ND, stale_N), batch_size=4)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Mean loss over the evaluation set."""
    model.eval()
    losses = torch.stack([nn.functional.mse_loss(model(x), y) for x, y in loader])
    model.train()
    if FAULT == "local_early_stop":
        return losses.mean().item()  # fault: local_early_stop
    return accelerator.gather_for_metrics(losses).mean().item()


def log(accelerator: Accelerator, place: str, loss: Tensor) -> None:
    """Print the mean loss of all ranks."""
    if FAULT != "main_process_metrics":
        mean = accelerator.gather_for_metrics(loss).mean().item()
        accelerator.print(place, mean)
    elif accelerator.is_main_process:  # fault: main_process_metrics
        print(place, accelerator.gather_for_metrics(loss).mean().item())  # fault: main_process_metrics


def train(accelerator: Accelerator) -> None:
    """Until the evaluation gets worse."""
    torch.manual_seed(0)
    model = Regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *loaders())
    best = float("inf")
    for epoch in range(NUM_EPOCHS):
        for step, (x, y) in enumerate(train_loader):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                log(accelerator, f"epoch {epoch} step {step}", loss.detach())
        eval_loss = evaluate(accelerator, model, eval_loader)
        if eval_loss > best:  # fault: local_early_stop
            break  # fault: local_early_stop
        best = eval_loss


def main() -> None:
    """Train under the tool."""
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend=BACKEND))
    with watched():
        train(accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    main()
