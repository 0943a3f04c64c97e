"""Normalised activations -> MLP output, hidden features sharded over the TP group."""

# B batch, S sequence, D model width, F hidden width; f = F / tp is this rank's share
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tpcompile.block_args import BlockArgs
from tpcompile.collectives.strategies import TpComm
from tpcompile.fastpath import plain
from tpcompile.layout import Part
from tpcompile.nn.dropout import Dropout
from tpcompile.nn.fast_paths import Site
from tpcompile.nn.linear import ColumnParallelLinear, PackedColumnLinear, RowParallelLinear, few_rows_site
from tpcompile.nn.sharding import Declared


class _MLP(nn.Module):
    """What both forms share: the activation's fast path, dropout of the hidden features, the row-parallel linear."""

    path: ClassVar[str]
    """Name of the activation's fast path."""
    entering: ClassVar[str]
    """Name of the column-parallel linear, which is declared before `down`: weights are drawn in this order."""
    down: RowParallelLinear

    def __init__(self, args: BlockArgs, comm: TpComm, *, site: int) -> None:
        super().__init__()
        # With a width that is no multiple of 8 Inductor pads matmuls itself where it times that to be faster, on each
        # rank for itself.
        self.hidden = Part(args.ffn_dim, padded=args.uneven == "pad", align=8)
        self.width = self.hidden.share(comm.size)
        self.dtype = getattr(torch, args.dtype)
        self.fast_path: Callable[..., Any] | None = None
        self.options = {
            "bias": args.bias, "comm": comm, "dtype": self.dtype, "sequence_parallel": args.sequence_parallel,
        }  # fmt: skip
        self.dropout = Dropout(args.dropout, site=site, comm=comm, sharded_dim=-1, full_size=args.ffn_dim)

    def site(self, batch: int, seq_len: int) -> Site:
        """The activation."""
        return Site(self.path, ((batch, seq_len, self.width),), dtype=self.dtype)

    def forward(self, x_BSD: Tensor, seed: Tensor | None = None, *, reduce: bool = True) -> Tensor:
        """[B, S, D] -> [B, S, D]; this rank's part of it, without the bias, unless `reduce`.

        `seed` [1] int64 is needed when training with dropout.
        """
        h_BSf = self.dropout(self.hidden_of(x_BSD), seed)
        return self.down(h_BSf) if reduce else self.down.partial(h_BSf)

    def hidden_of(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, F / tp]."""
        raise NotImplementedError

    def declared(self, x_shape: Sequence[int], dtype: torch.dtype, *, reduce: bool = True) -> Declared:
        """Collectives of this module for an input whose full shape is `x_shape`."""
        entered: Declared = getattr(self, self.entering).declared(x_shape, dtype)
        return entered.then(self.down.declared(x_shape, dtype)) if reduce else entered


class GeluMLP(_MLP):
    """Linear, GELU (tanh form, as Wan), linear: [B, S, D] -> [B, S, D] replicated; sequence parallel: [s, B, D]."""

    path = "gelu_tanh"
    entering = "up"

    def __init__(self, args: BlockArgs, comm: TpComm, *, site: int = 0) -> None:
        super().__init__(args, comm, site=site)
        self.up = ColumnParallelLinear(args.dim, self.hidden, **self.options)
        self.takes_product = False
        self.down = RowParallelLinear(self.hidden, args.dim, **self.options)

    def site(self, batch: int, seq_len: int) -> Site:
        """The activation; with the up projection, which must have a bias, where tokens are not sharded."""
        site = super().site(batch, seq_len)
        if self.up.bias is None or self.up.sequence_parallel:
            return site
        (hidden,) = site.shapes
        entered = (*hidden[:-1], self.up.weight.shape[1])
        few = few_rows_site("few_rows_linear_gelu", self.up.weight, batch, seq_len)
        product = Site("linear_gelu_tanh", (entered, hidden), dtype=self.dtype, forward_only=few)
        return replace(site, forward_only=product)

    def hidden_of(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, F / tp]."""
        if self.takes_product and self.fast_path is not None:
            return self.up.multiplied(x_BSD, self.fast_path)
        activation = self.fast_path or plain.gelu_tanh
        return activation(self.up(x_BSD))


class SwiGLU(_MLP):
    """silu(gate) * up, then down, gate and up packed in one matmul; shapes as GeluMLP."""

    path = "silu_mul"
    entering = "gate_up"

    def __init__(self, args: BlockArgs, comm: TpComm, *, site: int = 0) -> None:
        super().__init__(args, comm, site=site)
        self.gate_up = PackedColumnLinear(args.dim, (self.hidden, self.hidden), **self.options)
        self.down = RowParallelLinear(self.hidden, args.dim, **self.options)

    def hidden_of(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, F / tp]."""
        activation = self.fast_path or plain.silu_mul
        return activation(*self.gate_up(x_BSD))
