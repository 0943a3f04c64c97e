"""Programs whose steps draw random numbers, `--target tests.gate.own_random:NAME`; `wrong=yes` halves the result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import tpcompile
from tpcompile.target import TargetContext

WIDTH = 16


class Noisy(nn.Module):
    """Noise on what all ranks hold, as a diffusion model's loss draws it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter((torch.randn(WIDTH, WIDTH) / 4).bfloat16())
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return (x + torch.randn_like(x)) @ self.weight * self.factor


@torch.library.custom_op("tests_random::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Drawn where nobody sees it, as the mask of an attention kernel."""
    return torch.randn_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Hidden(Noisy):
    """The same noise inside of an op."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return (x + noise(x)) @ self.weight * self.factor


def _made(ctx: TargetContext, module: type[Noisy]) -> tpcompile.Target:
    def step(program: Callable[[Tensor], Tensor], inputs: tuple[Tensor]) -> Tensor:
        torch.manual_seed(3)
        return program(*inputs)

    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    factor = 0.5 if ctx.settings.get("wrong") else 1.0
    return tpcompile.Target(
        program=module(factor), inputs=(x,), reference=module(1.0), step=step, tp_aware=("tests_random::noise",)
    )  # fmt: skip


def noisy(ctx: TargetContext) -> tpcompile.Target:
    return _made(ctx, Noisy)


def hidden(ctx: TargetContext) -> tpcompile.Target:
    return _made(ctx, Hidden)


class Dropping(nn.Module):
    """Dropout, whose mask compiled code draws with numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return nn.functional.dropout(self.linear(x), 0.2)


def dropping(ctx: TargetContext) -> tpcompile.Target:
    """A step that does not zero gradients."""

    def step(program: Callable[[Tensor], Tensor], inputs: tuple[Tensor]) -> Tensor:
        loss = program(*inputs).square().mean()
        loss.backward()
        return loss.detach()

    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    return tpcompile.Target(program=Dropping(), inputs=(x,), reference=Dropping(), step=step)
