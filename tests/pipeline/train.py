"""Two pipeline stages, each on 2 x 2 ranks of data and tensor parallelism: `train.py HOW FAULT`.

HOW is `sentinel`, `check`, or `after` (`check` of ranks that nothing watched before).

FAULT is `none`, `stage` (the second stage multiplies with a constant of the rank), `rank` (rank 5 has a graph of its
own), or `late` (the microbatch of ranks 1 and 5 is a larger one at step 2, for which rank 1 recompiles).
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tpcompile
from tpcompile.sentinel import Sentinel

# B batch, D model dim, H hidden dim; h = H / tp, the hidden units of this rank
HOW, FAULT = sys.argv[1:]
B, D, H, STEPS = 4, 8, 16, 4


class Layer(nn.Module):
    """An MLP whose hidden units are sharded over tp."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, num_hidden = group, H // group.size()
        self.up, self.down = nn.Linear(D, num_hidden, bias=False), nn.Linear(num_hidden, D, bias=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Tokens -> tokens."""
        hidden_Bh = torch.relu(self.up(tpcompile.collectives.copy_to_tp(x_BD, group=self.group)))
        y_BD = tpcompile.collectives.all_reduce(self.down(hidden_Bh), group=self.group)  # partial -> replicated
        return x_BD + y_BD


class Last(nn.Module):
    """The second stage: two layers, a norm and the loss."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layers, self.norm = nn.Sequential(Layer(group), Layer(group)), nn.LayerNorm(D)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Tokens -> a loss."""
        y_BD = self.norm(self.layers(x_BD))
        if FAULT == "stage":
            y_BD = y_BD * (1.0 + dist.get_rank() % 2)  # fault: stage
        if FAULT == "rank" and dist.get_rank() == 5:
            y_BD = y_BD.neg().neg()  # fault: rank
        return y_BD.square().mean()


class Pipeline:
    """One stage, and its neighbour along pp."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.is_first = mesh.get_local_rank("pp") == 0
        ranks = dist.get_process_group_ranks(mesh.get_group("pp"))
        self.neighbour = ranks[1] if self.is_first else ranks[0]
        group = mesh.get_group("tp")
        module = Layer(group) if self.is_first else Last(group)
        self.stage = torch.compile(module, backend="aot_eager", dynamic=False)
        self.parameters = list(module.parameters())

    def step(self, number: int) -> None:
        """One batch forward and backward through both stages; gradients are averaged over dp."""
        num_rows = B + (FAULT == "late" and number == 2 and dist.get_rank() % 4 == 1)
        if self.is_first:
            y_BD = self.stage(torch.ones(num_rows, D))
            dist.send(y_BD.detach(), self.neighbour)
            gradient_BD = torch.empty_like(y_BD)
            dist.recv(gradient_BD, self.neighbour)
            y_BD.backward(gradient_BD)
        else:
            x_BD = torch.empty(num_rows, D)
            dist.recv(x_BD, self.neighbour)
            x_BD.requires_grad_()
            self.stage(x_BD).backward()
            assert x_BD.grad is not None
            dist.send(x_BD.grad, self.neighbour)
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad, group=self.mesh.get_group("dp"))


def main() -> None:
    """Train for some steps, watched in one of two ways."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(0)
    pipeline = Pipeline(mesh)
    if HOW == "sentinel":
        with Sentinel(mesh=mesh, axis="tp", run_dir="run"):
            for number in range(STEPS):
                pipeline.step(number)
        return
    with tpcompile.capture(mesh, run_dir="run", watch=HOW == "check") as run:
        for number in range(STEPS):
            pipeline.step(number)
    verdict = tpcompile.check(run)
    verdict.print()
    verdict.publish("run")
    verdict.raise_for_status()


dist.init_process_group("gloo")
try:
    main()
finally:
    dist.destroy_process_group()
