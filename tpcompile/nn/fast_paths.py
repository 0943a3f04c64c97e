"""A stack -> the same stack with fast paths where all ranks decided for them, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.errors import FastPathError
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.fastpath import peers, plain
from tpcompile.fastpath.measured import Decision
from tpcompile.fastpath.selection import Selection
from tpcompile.torch_api import symmetric
from tpcompile.torch_api.early_start import let_start_early

if TYPE_CHECKING:
    from tpcompile.fastpath.kernels.exchange_memory import Exchange  # imports Triton


@dataclass(frozen=True)
class Site:
    """A place in a module where a fast path can stand for plain code."""

    path: str
    """Name of the fast path; empty where there is only one without a backward."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that decide about its speed; the first has all tokens."""
    variant: str = ""
    dtype: torch.dtype = torch.float32
    exchanging: str = ""
    """Name of the fast path that sums over the ranks within its kernel as well: on GPUs, without a backward."""
    alone: str = ""
    """Name of the fast path for a group of one rank, whose tensors are no shards."""
    comm: TpComm | None = None
    """What the module sums with."""
    forward_only: Site | None = None
    """The place of a fast path without a backward, which is preferred where nothing is trained."""

    @property
    def forward_only_paths(self) -> tuple[str, ...]:
        """The fast paths without a backward, those preferred last."""
        site = self.forward_only
        return () if site is None else (site.path, *site.forward_only_paths)


@runtime_checkable
class HasSite(Protocol):
    """A module with a place for a fast path. It may also have, and is then told:

    exchange        its fast path can sum over the ranks within its kernel: an Exchange, PlainExchange or None
    takes_packed    it has a fast path for one GPU, which takes q, k and v as one projection: True where it is used
    takes_product   its `forward_only` fast path includes the matrix product before its place: True where it is used
    """

    fast_path: Callable[..., Any] | None

    def site(self, batch: int, seq_len: int) -> Site | None:
        """The place, for an input [batch, seq_len, D] of the whole stack; None where the form has no fast path."""


@dataclass(frozen=True)
class PlainExchange:
    """Stands for an Exchange where plain code stands for its kernel: the collective in it."""

    all_reduce: plain.AllReduce


_PLAIN_EXCHANGES: dict[str, tuple[Callable[..., Any], Literal["I", "R"]]] = {
    "qk_norm_rope_exchange": (plain.qk_norm_rope, "R"),
    "all_reduce_add_rms_norm": (plain.all_reduce_add_rms_norm, "I"),
}
"""Fast path -> its plain code, and the gradient of the sum in it."""


def use_fast_paths(
    stack: nn.Module,
    selection: Selection,
    *,
    batch: int,
    seq_len: int,
    train: bool,
    wait_s: float | None = None,
) -> dict[str, Decision]:
    """Decide for every place in the stack; all ranks must call it alike. Fast path -> what was decided.

    Where kernels sum over the ranks, all layers share one exchange: the stack runs on one stream at a time. Call
    `check_exchanges` where the host waits for the GPU anyway. Their kernels wait for a rank about `wait_s` seconds, by
    default 30; ranks must not be further apart than that. Raises FastPathError where a module sums over ranks that are
    not those of the selection.
    """
    deciding = _Deciding(selection, next(stack.parameters()).device, train, wait_s)
    for module, site in _places(stack, batch, seq_len):
        path = deciding.path_at(site)
        module.fast_path = None
        if path:
            from tpcompile.fastpath.kernels.all import EARLY, LAUNCHERS  # imports Triton

            module.fast_path = LAUNCHERS[path]
            if path in EARLY:
                let_start_early(EARLY[path])
        if hasattr(module, "takes_packed"):
            module.takes_packed = bool(path) and path == site.alone
        if hasattr(module, "takes_product"):
            module.takes_product = path in site.forward_only_paths
        if hasattr(module, "exchange"):
            module.exchange = deciding.exchange_of(path, site)
    return deciding.decisions


def check_exchanges(stack: nn.Module) -> None:
    """Raise FastPathError when some rank did not arrive at an exchange; waits for the device.

    Also where an exchange joins ranks other than those that its module sums over.
    """
    exchanges: dict[int, Exchange] = {}
    for module, site in _places(stack, 1, 1):
        exchange = getattr(module, "exchange", None)
        if exchange is None or isinstance(exchange, PlainExchange):
            continue
        _check_group(exchange.group, site)
        exchanges[id(exchange)] = exchange
    for exchange in exchanges.values():
        peers.check(exchange)


def use_plain_code(stack: nn.Module, *, exchanging: bool = False) -> None:
    """Let every place call the plain code of its fast path: the same call as far as the type check can follow it.

    With `exchanging`, that of the fast path which sums over the ranks within its kernel, where a place has one.
    """
    for module, site in _places(stack, 1, 1):
        module.fast_path = getattr(plain, site.path) if site.path else None
        if not hasattr(module, "exchange"):
            continue
        module.exchange = None
        if exchanging and site.exchanging:
            assert site.comm is not None, "it sums over the ranks"
            code, dst = _PLAIN_EXCHANGES[site.exchanging]
            module.fast_path = partial(_with_collective, code)
            module.exchange = PlainExchange(partial(site.comm.all_reduce, dst=dst))


def _with_collective(code: Callable[..., Any], *args: Any, exchange: PlainExchange, **options: Any) -> Any:
    """What a place calls in place of the fast path that exchanges."""
    return code(*args, all_reduce=exchange.all_reduce, **options)


@dataclass
class _Deciding:
    """Decisions for the places of one stack, and the exchanges that its layers share."""

    selection: Selection
    device: torch.device
    train: bool
    wait_s: float | None = None
    """How long kernels wait for other ranks."""
    decisions: dict[str, Decision] = field(default_factory=dict)
    exchanges: dict[str, Exchange] = field(default_factory=dict)

    def path_at(self, site: Site) -> str:
        """The fast path that all ranks decided for at this place; empty for plain code."""
        if site.forward_only is not None and not self.train:
            path = self.path_at(site.forward_only)
            if path:
                return path
        parts = [site.variant, "train"] if self.train else [site.variant]
        variant = ", ".join(filter(None, parts))
        for path in filter(None, (self.special(site), site.path)):
            decision = self.selection.decide(path, site.shapes, site.dtype, variant=variant)
            self.decisions[path] = decision
            if decision.is_used:
                return path
        return ""

    def special(self, site: Site) -> str:
        """The first choice in a group of this size; empty when there is none."""
        group = self.selection.group
        is_alone = group is None or group.size() == 1
        if is_alone:
            return site.alone
        if self.train or not site.exchanging:
            return ""
        return site.exchanging if symmetric.can_share(self.device) else ""

    def exchange_of(self, path: str, site: Site) -> Exchange | None:
        """The exchange of that fast path; None for one that does not sum over the ranks."""
        if not path or path != site.exchanging:
            return None
        if path not in self.exchanges:
            decision, group = self.decisions[path], self.selection.group
            self.exchanges[path] = _exchange(decision, site, group, self.device, wait_s=self.wait_s)
        return self.exchanges[path]


def _places(stack: nn.Module, batch: int, seq_len: int) -> Iterator[tuple[Any, Site]]:
    for module in stack.modules():
        if not isinstance(module, HasSite):
            continue
        site = module.site(batch, seq_len)
        if site is not None:
            yield module, site


def _exchange(
    decision: Decision, site: Site, group: dist.ProcessGroup, device: torch.device, *, wait_s: float | None
) -> Exchange:
    """The exchange of a fast path, with the grid and memory that all ranks decided for."""
    from tpcompile.fastpath.kernels.all import ROW_WORDS  # imports Triton
    from tpcompile.fastpath.kernels.exchange_memory import Exchange, polls_in

    _check_group(group, site)
    shape = decision.shape
    row_words = ROW_WORDS[decision.path](shape.widths[0], getattr(torch, shape.dtype), shape.tokens)
    limits = {} if decision.num_programs is None else {"num_programs": decision.num_programs}
    if wait_s is not None:
        limits["max_polls"] = polls_in(wait_s)
    return Exchange.of_group(group, num_rows=shape.tokens, row_words=row_words, device=device, **limits)


def _check_group(group: dist.ProcessGroup | None, site: Site) -> None:
    """Raise FastPathError when a kernel would sum over ranks other than those that its module sums over."""
    own = site.comm.group if site.comm is not None else None
    if group is None or own is None:
        return
    exchanged, summed = (dist.get_process_group_ranks(each) for each in (group, own))
    if exchanged != summed:
        raise FastPathError(
            f"fast path {site.exchanging}: its exchange joins {named_ranks(exchanged)}, and the module sums over "
            f"{named_ranks(summed)}; make the selection, or the exchange, of the module's group"
        )
