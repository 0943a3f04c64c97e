"""Shards cut by hand: Megatron's f and g on process groups, a pipeline of stages, experts over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.target import Target, TargetContext

WIDTH = 64


class Copy(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[..., D] -> [..., D]."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The sum over the ranks."""
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduce(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[..., D] -> [..., D]."""
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient."""
        return gradient, None


class Network(nn.Module):
    """Column- and row-parallel linears between f and g."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        hidden = 4 * WIDTH // dist.get_world_size(group)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        y = Copy.apply(self.norm(x), self.group)
        return x + Reduce.apply(self.down(F.gelu(self.up(y))), self.group)


def _groups(size: int) -> tuple[dist.ProcessGroup, int]:
    """As Megatron makes them: every rank makes all groups, and keeps its own."""
    own, place = None, 0
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own, place = group, dist.get_rank() - first
    assert own is not None
    return own, place


def megatron(ctx: TargetContext) -> Target:
    """Groups of its own; trained."""
    group, place = _groups(ctx.mesh["tp"].size())
    model = Network(group).to(ctx.device)
    torch.manual_seed(1234 + place)

    def step(program: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        x = inputs[0].requires_grad_()
        loss = program(x).square().mean()
        loss.backward()
        return loss

    return Target(program=model, inputs=(torch.randn(2, 16, WIDTH, device=ctx.device),), step=step)


def vocabulary_parallel(ctx: TargetContext) -> Target:
    """A vocabulary over the ranks: bounds that a rank has as data."""
    group = ctx.mesh.get_group("tp")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = 128 // size
    weight = torch.randn(rows, WIDTH, device=ctx.device)
    first = torch.tensor(rank * rows, device=ctx.device)

    def program(ids: Tensor, weight: Tensor, first: Tensor) -> Tensor:
        own = ids - first
        outside = (own < 0) | (own >= rows)
        y = F.embedding(own.masked_fill(outside, 0), weight).masked_fill(outside[..., None], 0.0)
        dist.all_reduce(y, group=group)
        return y

    ids = torch.randint(128, (2, 16), device=ctx.device)
    return Target(program=program, inputs=(ids, weight, first))


def pipeline(ctx: TargetContext) -> Target:
    """Stages differ: the first embeds, the last has a head, and one has more layers."""
    mesh = ctx.mesh
    stage, num_stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    group = mesh.get_group("tp")
    layers: list[nn.Module] = [Network(group) for _ in range(2 if stage == 0 else 3)]
    inputs = torch.randn(2, 16, WIDTH, device=ctx.device)
    if stage == 0:
        layers.insert(0, nn.Embedding(128, WIDTH))
        inputs = torch.randint(128, (2, 16), device=ctx.device)
    if stage == num_stages - 1:
        layers.append(nn.Linear(WIDTH, 128))
    return Target(program=nn.Sequential(*layers).to(ctx.device), inputs=(inputs,))


class Experts(nn.Module):
    """Experts over the ranks: tokens are sent to theirs and back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D], T is a multiple of the ranks."""
        sent = torch.empty_like(x_TD)
        dist.all_to_all_single(sent, x_TD.contiguous(), group=self.group)
        y_TD = F.relu(self.expert(sent))
        back = torch.empty_like(y_TD)
        dist.all_to_all_single(back, y_TD, group=self.group)
        return back


@torch.no_grad()
def experts(ctx: TargetContext) -> Target:
    """Inference."""
    model = Experts(ctx.mesh.get_group("tp")).to(ctx.device).requires_grad_(requires_grad=False)
    return Target(program=model, inputs=(torch.randn(64, WIDTH, device=ctx.device),))
