"""Targets of `tpcompile fusion bisect`: each has more kernels than it would have without one kind of op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._library.effects import EffectType

import tpcompile
from tests.fusion.zoo import add_to, doubled
from tpcompile.target import TargetContext

SIDE = 64
SQUARE = (SIDE, SIDE)


@torch.library.custom_op("tpcompile_kept_apart::logged", mutates_args=())
def logged(x: Tensor) -> None:
    """Stands for a print."""


@logged.register_fake
def _(x: Tensor) -> None:
    pass


torch.library._register_effectful_op("tpcompile_kept_apart::logged", EffectType.ORDERED)


def _target(program: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[TargetContext], tpcompile.Target]:
    def build(ctx: TargetContext) -> tpcompile.Target:
        inputs = [torch.randn(shape, device=ctx.device) for shape in shapes]
        return tpcompile.Target(program=program, inputs=tuple(inputs))

    return build


def _one_kernel(x: Tensor) -> Tensor:
    return (x.sin() * 2).cos()


def _transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.t().contiguous().softmax(-1), x.softmax(-1)


def _cast(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.double().sin()
    return y, y.float() + 1


def _gathered(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x.sin(), 0, dist.group.WORLD).cos()


def _scattered(x: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(x.sin(), "sum", 0, dist.group.WORLD).cos()


def _custom(x: Tensor) -> Tensor:
    return doubled(x.sin()).cos()


def _custom_in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x.sin()
    add_to(z, y)
    return z.cos()


def _printed(x: Tensor) -> Tensor:
    y = x.sin()
    logged(y)
    return y.cos()


def _into_an_input(x: Tensor, y: Tensor) -> Tensor:
    z = x + y
    x.copy_(z.flip(0))
    return z * 2


def _even_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    even = x.shape[0] // 2 * 2
    return x.sum(1), (x[:even] * 2).sum(1)


one_kernel = _target(_one_kernel, SQUARE)
transposed = _target(_transposed, SQUARE)
cast = _target(_cast, SQUARE)
gathered = _target(_gathered, SQUARE)
scattered = _target(_scattered, SQUARE)
custom = _target(_custom, SQUARE)
custom_in_place = _target(_custom_in_place, SQUARE, SQUARE)
printed = _target(_printed, SQUARE)
into_an_input = _target(_into_an_input, SQUARE, SQUARE)


def dynamic(ctx: TargetContext) -> tpcompile.Target:
    """The first size is dynamic."""
    x = torch.randn(SQUARE, device=ctx.device)
    torch._dynamo.mark_dynamic(x, 0)
    return tpcompile.Target(program=_even_rows, inputs=(x,))


def compiled_already(ctx: TargetContext) -> tpcompile.Target:
    """Compiles itself."""
    x = torch.randn(SQUARE, device=ctx.device)
    return tpcompile.Target(program=torch.compile(_one_kernel), inputs=(x,), is_compiled=True)
