"""DistributedDataParallel and torch.compile, whose DDPOptimizer splits the graph at the buckets; one shard a rank.

torchrun --standalone --nproc-per-node 4 tests/clients/ddp/program.py [uneven_shards | invalid_batch]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.clients.watched import BACKEND, watched

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WIDTH, BATCH, NUM_SAMPLES = 512, 4, 48  # a layer of this width has 1 MiB, the smallest bucket of DDPOptimizer


class Shard(IterableDataset):
    """The samples of this rank, as a reader of one file per rank gives them."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.samples = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        if FAULT == "uneven_shards" and rank == 1:
            self.samples = self.samples[: -2 * BATCH]  # fault: uneven_shards
        if FAULT == "invalid_batch" and rank == 1:
            self.samples[5 * BATCH] = float("nan")

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.samples


class Net(nn.Module):
    """Four layers: DDP breaks the graph, and of what follows only modules of the user's own are compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x_BD: Tensor) -> Tensor:
        """[B, D] -> [B, 1]."""
        for layer in self.hidden:
            x_BD = torch.relu(layer(x_BD))
        return self.head(x_BD)


def train(rank: int) -> None:
    """One epoch, and the mean loss of all ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=1)
    compiled = torch.compile(model, backend=BACKEND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total = torch.zeros(())
    for x_BD in DataLoader(Shard(rank), batch_size=BATCH):  # fault: uneven_shards
        optimizer.zero_grad()
        loss = compiled(x_BD).square().mean()
        if not torch.isfinite(loss):  # fault: invalid_batch
            continue  # fault: invalid_batch
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"mean loss {total.item():.4f}")


def main() -> None:
    """Train under the tool."""
    dist.init_process_group("gloo")
    with watched():
        train(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
