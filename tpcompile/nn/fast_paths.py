"""A stack -> the same stack with fast paths where all ranks decided for them, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from tpcompile.fastpath import plain
from tpcompile.fastpath.measured import Decision
from tpcompile.fastpath.selection import Selection
from tpcompile.torch_api import symmetric

if TYPE_CHECKING:
    from tpcompile.fastpath.kernels.exchange import Exchange  # imports Triton


@dataclass(frozen=True)
class Site:
    """A place in a module where a fast path can stand for plain code."""

    path: str
    """Name of the fast path."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors that decide about its speed; the first has all tokens."""
    variant: str = ""
    dtype: torch.dtype = torch.float32
    exchanging: str = ""
    """Name of the fast path that sums over the ranks within its kernel as well: on GPUs, without a backward."""


@runtime_checkable
class HasSite(Protocol):
    """A module with a place for a fast path."""

    fast_path: Callable[..., Any] | None

    def site(self, batch: int, seq_len: int) -> Site | None:
        """The place, for an input [batch, seq_len, D] of the whole stack; None where the form has no fast path."""


@runtime_checkable
class HasExchange(HasSite, Protocol):
    """A module whose fast path can sum over the ranks within its kernel."""

    exchange: Exchange | None


def use_fast_paths(
    stack: nn.Module, selection: Selection, *, batch: int, seq_len: int, train: bool
) -> dict[str, Decision]:
    """Decide for every place in the stack; all ranks must call it alike. Fast path -> what was decided.

    Where kernels sum over the ranks, all layers share one exchange: the stack runs on one stream at a time. Look at it
    with `check_exchanges` where the host waits for the GPU anyway.
    """
    decisions: dict[str, Decision] = {}
    exchanges: dict[str, Exchange] = {}
    device = next(stack.parameters()).device
    for module, site in _places(stack, batch, seq_len):
        variant = ", ".join(filter(None, (site.variant, "train" if train else "")))
        can_exchange = site.exchanging and not train and symmetric.can_share(device)
        for path in (site.exchanging, site.path) if can_exchange else (site.path,):
            decisions[path] = selection.decide(path, site.shapes, site.dtype, variant=variant)
            if decisions[path].is_used:
                break
        module.fast_path = _launcher(path) if decisions[path].is_used else None
        if isinstance(module, HasExchange):
            is_exchanged = module.fast_path is not None and path == site.exchanging
            if is_exchanged and path not in exchanges:
                exchanges[path] = _exchange(decisions[path], selection.group, device)
            module.exchange = exchanges[path] if is_exchanged else None
    return decisions


def check_exchanges(stack: nn.Module) -> None:
    """Raise FastPathError when some rank did not arrive at an exchange; waits for the device."""
    exchanges = {id(module.exchange): module.exchange for module in stack.modules() if isinstance(module, HasExchange)}
    for exchange in exchanges.values():
        if exchange is not None:
            exchange.check()


def use_plain_code(stack: nn.Module) -> None:
    """Let every place call the plain code of its fast path: the same call as far as the type check can follow it."""
    for module, site in _places(stack, 1, 1):
        module.fast_path = getattr(plain, site.path)


def _places(stack: nn.Module, batch: int, seq_len: int) -> Iterator[tuple[HasSite, Site]]:
    for module in stack.modules():
        site = module.site(batch, seq_len) if isinstance(module, HasSite) else None
        if isinstance(module, HasSite) and site is not None:
            yield module, site


def _launcher(name: str) -> Callable[..., Any]:
    from tpcompile.fastpath.kernels.all import LAUNCHERS  # imports Triton

    return LAUNCHERS[name]


def _exchange(decision: Decision, group: dist.ProcessGroup, device: torch.device) -> Exchange:
    """Its grid and its memory, for all rows of the shape class, are those of the decision: equal on all ranks."""
    from tpcompile.fastpath.kernels.all import ROW_WORDS  # imports Triton
    from tpcompile.fastpath.kernels.exchange import Exchange

    shape = decision.shape
    row_words = ROW_WORDS[decision.path](shape.widths[0], getattr(torch, shape.dtype))
    limits = {} if decision.num_programs is None else {"num_programs": decision.num_programs}
    return Exchange.of_group(group, num_rows=shape.tokens, row_words=row_words, device=device, **limits)
