"""A stack -> the same stack with fast paths where all ranks decided for them, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from tpcompile.fastpath import plain
from tpcompile.fastpath.selection import Decision, Selection


@dataclass(frozen=True)
class Site:
    """A place in a module where a fast path can stand for plain code."""

    path: str
    """Name of the fast path."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors that decide about its speed; the first has all tokens."""
    variant: str = ""
    dtype: torch.dtype = torch.float32


@runtime_checkable
class HasSite(Protocol):
    """A module with a place for a fast path."""

    fast_path: Callable[..., Any] | None

    def site(self, batch: int, seq_len: int) -> Site | None:
        """The place, for an input [batch, seq_len, D] of the whole stack; None where the form has no fast path."""


def use_fast_paths(
    stack: nn.Module, selection: Selection, *, batch: int, seq_len: int, train: bool
) -> dict[str, Decision]:
    """Decide for every place in the stack; all ranks must call it alike. Fast path -> what was decided."""
    decisions = {}
    for module in stack.modules():
        site = module.site(batch, seq_len) if isinstance(module, HasSite) else None
        if site is None:
            continue
        variant = ", ".join(filter(None, (site.variant, "train" if train else "")))
        decision = selection.decide(site.path, site.shapes, site.dtype, variant=variant)
        module.fast_path = _launcher(site.path) if decision.is_used else None
        decisions[site.path] = decision
    return decisions


def _launcher(name: str) -> Callable[..., Any]:
    from tpcompile.fastpath.kernels.all import LAUNCHERS  # imports Triton

    return LAUNCHERS[name]


def use_plain_code(stack: nn.Module) -> None:
    """Let every place call the plain code of its fast path: the same call as far as the type check can follow it."""
    for module in stack.modules():
        site = module.site(1, 1) if isinstance(module, HasSite) else None
        if site is not None:
            module.fast_path = getattr(plain, site.path)
