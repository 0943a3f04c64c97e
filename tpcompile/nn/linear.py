"""Replicated activations -> column-sharded activations -> replicated activations, by two kinds of linear.

The sequence-parallel form starts and ends with activations sharded over tokens on dim 0 instead of replicated.
Weights are allocated, not initialised: fill them with `tpcompile.nn.state.load_full_state_dict`.
"""

# I input features, O output features; i = I / tp and o = O / tp are this rank's share
# ... the leading dims: B, S; sequence parallel: s, B with s = S / tp at the outer ends, S, B between the linears
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.errors import ConfigError
from tpcompile.fastpath.tiles import are_few_rows
from tpcompile.layout import Part, ShardSpec
from tpcompile.nn.fast_paths import Site
from tpcompile.nn.sharding import Declared, entered, gathered, reduced, scattered

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Input, weight and bias -> output: `F.linear`, or a fast path that does more."""


def few_rows_site(path: str, weight_OI: Tensor, batch: int, seq_len: int) -> Site | None:
    """The place of a product of a few tokens, where nothing is trained; None for more tokens and other sizes."""
    num_out, width = weight_OI.shape
    if not are_few_rows(batch * seq_len, num_out, width, weight_OI.dtype):
        return None
    return Site(path, ((batch, seq_len, width), (batch, seq_len, num_out)), dtype=weight_OI.dtype)


def _only_forward(site: Site | None) -> Site | None:
    """A place that has plain code where something is trained."""
    return None if site is None else Site("", site.shapes, dtype=site.dtype, forward_only=site)


class _ColumnLinear(nn.Module):
    """Output features sharded, part by part; enters the TP region once however many parts are packed."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[Part | int],
        *,
        bias: bool,
        comm: TpComm,
        dtype: torch.dtype = torch.float32,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.sequence_parallel = sequence_parallel
        self.layout = ShardSpec(dim=0, parts=tuple(parts))
        self.local_parts = tuple(part.share(comm.size, "out_features") for part in self.layout.packed)
        replicas = [part.replicas for part in self.layout.packed]
        if replicas != sorted(replicas) or len({count for count in replicas if count > 1}) > 1:
            raise ConfigError(
                f"replicas of packed parts are {replicas}; put parts without replicas first, the rest alike"
            )
        # Rows of the parts without replicas, which are first, so that one slice holds the others.
        self.num_own = sum(rows for rows, count in zip(self.local_parts, replicas, strict=True) if count == 1)
        self.replicas = max(replicas)
        self.replica_comm = comm.replicas(self.replicas)
        self.weight = nn.Parameter(torch.empty(sum(self.local_parts), in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(sum(self.local_parts), dtype=dtype)) if bias else None
        self.fast_path: Product | None = None

    def site(self, batch: int, seq_len: int) -> Site | None:
        """The product of a few tokens, where tokens are not sharded."""
        if self.sequence_parallel:
            return None
        return _only_forward(few_rows_site("few_rows_linear", self.weight, batch, seq_len))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Rows of the weight and the bias are sharded, each packed part on its own."""
        specs = {"weight": self.layout}
        return specs if self.bias is None else specs | {"bias": self.layout}

    def declared(self, x_shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """Collectives for an input whose full shape is `x_shape`."""
        total = gathered(x_shape, dtype, tp=self.comm.size) if self.sequence_parallel else entered(x_shape, dtype)
        if self.replicas > 1:
            num_shared = sum(self.local_parts) - self.num_own
            total = total.then(entered((num_shared, self.weight.shape[1]), dtype, group="tp_replicas"))
            if self.bias is not None:
                total = total.then(entered((num_shared,), dtype, group="tp_replicas"))
        return total

    def multiplied(self, x_I: Tensor, product: Product | None = None) -> Tensor:
        """[..., I] -> all output features of this rank, the packed parts side by side; by `product` if it is given."""
        if self.sequence_parallel:
            x_I = self.comm.all_gather(x_I, dim=0, dst="R")  # tokens sharded -> replicated, partial gradient
        else:
            x_I = self.comm.copy_to_tp(x_I)  # identity; gradient partial -> replicated
        weight, bias = self.weight, self.bias
        if self.replicas > 1 and torch.is_grad_enabled():
            weight = self._shared(weight)
            bias = bias if bias is None else self._shared(bias)
        product = product or _of_few_rows(self.fast_path, x_I, weight)
        if product is not None:
            return product(x_I, weight, bias)
        return F.linear(x_I, weight, bias)

    def _shared(self, rows: Tensor) -> Tensor:
        """The replicated parts enter a region of their own: each replica sees a part of their gradient."""
        own, shared = rows.tensor_split((self.num_own,))
        return torch.cat((own, self.replica_comm.copy_to_tp(shared)))


class ColumnParallelLinear(_ColumnLinear):
    """[..., I] replicated -> [..., O / tp]; the gradient of the input is all-reduced.

    Raises ConfigError when tp does not divide `out_features`, unless that is a padded `Part`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Part | int,
        *,
        bias: bool,
        comm: TpComm,
        dtype: torch.dtype = torch.float32,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(
            in_features, (out_features,), bias=bias, comm=comm, dtype=dtype, sequence_parallel=sequence_parallel
        )

    def forward(self, x_I: Tensor) -> Tensor:
        """[..., I] -> [..., O / tp]; sequence parallel: [s, B, I] -> [S, B, O / tp]."""
        return self.multiplied(x_I)


class PackedColumnLinear(_ColumnLinear):
    """Several column-parallel linears of one input in one matmul: [..., I] -> one [..., part / tp] per part.

    The rows of rank r are its share of part 0, then its share of part 1, and so on. Parts with `replicas` come last.
    Raises ConfigError when tp does not divide every part.
    """

    def forward(self, x_I: Tensor) -> tuple[Tensor, ...]:
        """[..., I] -> views of one output, in the order of the parts."""
        return self.multiplied(x_I).split(self.local_parts, dim=-1)


class RowParallelLinear(nn.Module):
    """[..., I / tp] -> [..., O] replicated; the bias is added after the reduce, or it would count tp times.

    Sequence parallel: [S, B, I / tp] -> [S / tp, B, O]; every rank then adds the bias to different tokens, so its
    gradient is partial and summed. Raises ConfigError when tp does not divide `in_features`, unless it is a padded
    `Part`.
    """

    def __init__(
        self,
        in_features: Part | int,
        out_features: int,
        *,
        bias: bool,
        comm: TpComm,
        dtype: torch.dtype = torch.float32,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.sequence_parallel = sequence_parallel
        self.layout = ShardSpec(dim=1, parts=(in_features,))
        local_features = self.layout.packed[0].share(comm.size, "in_features")
        self.weight = nn.Parameter(torch.empty(out_features, local_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None
        self.fast_path: Product | None = None

    def site(self, batch: int, seq_len: int) -> Site | None:
        """The product of a few tokens, where tokens are not sharded."""
        if self.sequence_parallel:
            return None
        return _only_forward(few_rows_site("few_rows_linear", self.weight, batch, seq_len))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Columns of the weight are sharded, the bias is replicated."""
        specs = {"weight": self.layout}
        return specs if self.bias is None else specs | {"bias": ShardSpec()}

    def forward(self, x_i: Tensor) -> Tensor:
        """[..., I / tp] -> [..., O]; sequence parallel: [S, B, I / tp] -> [s, B, O]."""
        y_O = self.partial(x_i)
        if self.sequence_parallel:
            y_O = self.comm.reduce_scatter(y_O, dim=0)  # partial -> tokens sharded
            return y_O if self.bias is None else y_O + self.comm.copy_to_tp(self.bias)
        y_O = self.comm.all_reduce(y_O, dst="I")  # partial -> replicated
        return y_O if self.bias is None else y_O + self.bias

    def partial(self, x_i: Tensor) -> Tensor:
        """What this rank adds to the sum, without the bias."""
        product = _of_few_rows(self.fast_path, x_i, self.weight)
        if product is not None:
            return product(x_i, self.weight, None)
        return F.linear(x_i, self.weight)

    def declared(self, y_shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """Collectives for an output whose full shape is `y_shape`."""
        if not self.sequence_parallel:
            return reduced(y_shape, dtype)
        leave = scattered(y_shape, dtype, tp=self.comm.size, summed=True)
        return leave if self.bias is None else leave.then(entered(self.bias.shape, dtype))


def _of_few_rows(fast_path: Product | None, x_I: Tensor, weight_OI: Tensor) -> Product | None:
    """The fast path, where it takes so many tokens: a linear of a context has others than were decided for."""
    num_out, width = weight_OI.shape
    if fast_path is not None and are_few_rows(x_I.shape[:-1].numel(), num_out, width, weight_OI.dtype):
        return fast_path
    return None
