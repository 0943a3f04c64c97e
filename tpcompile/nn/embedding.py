"""Token ids -> embeddings, and activations -> logits: the two ends of a model, both sharded over the vocabulary.

Weights are allocated, not initialised: fill them with `tpcompile.nn.state.load_full_state_dict`.
"""

# V vocabulary, D model width; v = V / tp rows of this rank, rounded up where the vocabulary is padded
# ... the leading dims: B, S; sequence parallel: s, B with s = S / tp, or one dim T / tp of tokens
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.errors import ConfigError
from tpcompile.layout import Part, ShardSpec
from tpcompile.nn.linear import ColumnParallelLinear
from tpcompile.nn.sharding import Declared, reduced, scattered


class ParallelEmbedding(nn.Module):
    """Lookup in a table whose rows are sharded: ids [...] -> [..., D] replicated, equal to F.embedding.

    Every rank looks up the ids it owns, the others get zeros, and the sum over the ranks adds only zeros to the
    one row: exact in every dtype. The sequence-parallel form shards dim 0 of the ids: [T] -> [T / tp, D] token-major,
    [S, B] -> [S / tp, B, D]; pass `ids.flatten()` or `ids.t()` for ids [B, S].

    An id outside the vocabulary yields a row of NaN: reading the ids to raise would stop the device, and zeros would be
    trained on. `pad=True` rounds the rows of a rank up when tp does not divide the vocabulary; the padding rows
    come last and are never read. Raises ConfigError when tp does not divide it otherwise.
    """

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        *,
        comm: TpComm,
        dtype: torch.dtype = torch.float32,
        pad: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.num_embeddings = num_embeddings
        self.sequence_parallel = sequence_parallel
        self.layout = ShardSpec(dim=0, parts=(Part(num_embeddings, padded=pad),))
        self.num_local = self.layout.packed[0].share(comm.size, "num_embeddings")
        self.weight = nn.Parameter(torch.empty(self.num_local, dim, dtype=dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Rows of the table are sharded."""
        return {"weight": self.layout}

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 or int32 -> [..., D]; sequence parallel: dim 0 becomes this rank's share of it.

        Raises ConfigError for ids of the wrong dtype or without a dim.
        """
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() == 0:
            raise ConfigError(f"ids are {ids.dtype} with {ids.dim()} dims; pass int64 or int32 with at least one dim")
        y_D = self._own_rows(ids)
        if self.sequence_parallel:
            return self.comm.reduce_scatter(y_D, dim=0)  # partial -> tokens sharded
        return self.comm.all_reduce(y_D, dst="I")  # partial -> replicated

    def declared(self, ids_shape: Sequence[int]) -> Declared:
        """Collectives for ids of `ids_shape`."""
        shape, dtype = (*ids_shape, self.weight.shape[1]), self.weight.dtype
        if self.sequence_parallel:
            return scattered(shape, dtype, tp=self.comm.size, summed=True)
        return reduced(shape, dtype)

    def _own_rows(self, ids: Tensor) -> Tensor:
        known = (ids >= 0) & (ids < self.num_embeddings)
        # All ranks hold the same number of rows, so quotient and remainder are owner and row. Ids of other ranks read
        # the row of their remainder and not row 0: their zero gradients would all be added there.
        own = known & (ids // self.num_local == self.comm.rank_index(ids.device))
        blank = torch.zeros_like(ids, dtype=self.weight.dtype).masked_fill(~known, float("nan"))
        return torch.where(own.unsqueeze(-1), F.embedding(ids % self.num_local, self.weight), blank.unsqueeze(-1))


class ParallelLMHead(ColumnParallelLinear):
    """Column-parallel projection to the vocabulary: [..., D] replicated -> logits [..., V / tp].

    With `pad=True` the last columns of a vocabulary that tp does not divide are -inf: no softmax, maximum or sampling
    sees them, whatever the padding rows hold. Sequence parallel: [T / tp, D] -> [T, V / tp], any dims after dim 0.
    Raises ConfigError when tp does not divide `num_embeddings` and it is not padded.
    """

    def __init__(
        self,
        dim: int,
        num_embeddings: int,
        *,
        comm: TpComm,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        pad: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(
            dim, Part(num_embeddings, padded=pad), bias=bias, comm=comm, dtype=dtype,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        self.num_embeddings = num_embeddings
        self.tied = False

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Rows of weight and bias are sharded; a tied weight is the embedding's to declare."""
        return {name: spec for name, spec in super().shard_specs().items() if not (self.tied and name == "weight")}

    def tie(self, embedding: ParallelEmbedding) -> None:
        """Use the embedding's table as the weight: one Parameter, whose gradient gets both shares.

        Register the embedding before the head in the model, as it is the one that declares the table, and tie after
        `to_empty`, which gives every module a Parameter of its own. Raises ConfigError when the tables differ.
        """
        ours = (self.num_embeddings, tuple(self.weight.shape), self.weight.dtype, self.comm.size)
        theirs = (
            embedding.num_embeddings, tuple(embedding.weight.shape), embedding.weight.dtype, embedding.comm.size,
        )  # fmt: skip
        if ours != theirs:
            raise ConfigError(
                f"cannot tie (vocabulary, local weight, dtype, tp) {ours} of the head to {theirs} of the embedding; "
                "build both with the same sizes"
            )
        self.weight = embedding.weight
        self.tied = True

    def forward(self, x_D: Tensor) -> Tensor:
        """[..., D] -> [..., V / tp]."""
        logits_v = self.multiplied(x_D)
        num_columns = logits_v.shape[-1]
        if num_columns * self.comm.size == self.num_embeddings:
            return logits_v
        columns_v = vocab_columns(num_columns, comm=self.comm, device=logits_v.device)
        return logits_v.masked_fill(columns_v >= self.num_embeddings, float("-inf"))

    def gather(self, logits_v: Tensor) -> Tensor:
        """[..., V / tp] -> [..., V] replicated, without the padding, for work that all ranks repeat, e.g. sampling."""
        logits_V = self.comm.all_gather(logits_v, dim=-1, dst="I")  # columns sharded -> replicated
        return logits_V.narrow(-1, 0, self.num_embeddings)


def vocab_columns(num_columns: int, *, comm: TpComm, device: torch.device) -> Tensor:
    """Places in the vocabulary of this rank's columns, [v] int64; the rank enters as data, so graphs stay equal."""
    return torch.arange(num_columns, device=device) + comm.rank_index(device) * num_columns
