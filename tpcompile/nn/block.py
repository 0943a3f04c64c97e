"""Arguments of a block and a way to issue collectives -> the transformer block every mode and preset compiles."""

# B batch, S sequence, T context tokens, D model width, R = head size / 2 rotary pairs
# sequence parallel: s = S / tp, tokens before batch
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tpcompile.block_args import BlockArgs
from tpcompile.collectives.strategies import TpComm
from tpcompile.evidence.records import Collective
from tpcompile.fastpath.plain import stat_dtype
from tpcompile.layout import ShardSpec
from tpcompile.nn.attention import Attention, CrossAttention, KeysValues
from tpcompile.nn.cache import KVCache
from tpcompile.nn.dropout import Dropout
from tpcompile.nn.fast_paths import Site
from tpcompile.nn.linear import RowParallelLinear
from tpcompile.nn.mlp import GeluMLP, SwiGLU
from tpcompile.nn.norm import LayerNorm, RMSNorm
from tpcompile.nn.sharding import Declared, entered, gathered, scattered

if TYPE_CHECKING:
    from tpcompile.fastpath.kernels.exchange_memory import Exchange  # imports Triton

_SITES_PER_BLOCK = 3
"""Dropouts of a block, each with a site of its own: hidden features, attention, MLP."""


class BlockInputs(NamedTuple):
    """Arguments of a stack or a block, in order; those after `sin_SR` are needed by some `BlockArgs`."""

    x_BSD: Tensor
    cos_SR: Tensor
    sin_SR: Tensor
    modulation_B6D: Tensor | None = None
    """Time embedding that adaLN adds to its table."""
    context: Tensor | Sequence[KeysValues] | None = None
    """[B, T, D], or for a stack `project_context` of it: keys and values per block."""
    mask: Tensor | None = None
    """Broadcasts to [B, 1, S, S]: boolean, True where a query may look, or float, added to the logits."""
    seed: Tensor | None = None
    """[1] int64, equal on all ranks: decides every dropout mask of this call."""


class TransformerBlock(nn.Module):
    """Pre-norm block, x + attention(norm(x)) then + mlp(norm(.)); unsharded with a `comm` of size 1.

    Style `wan` has a GELU-tanh MLP, `llama` a SwiGLU; heads, norms, biases, mask, modulation, cross-attention, dropout
    and the sequence-parallel form follow `args`. Weights are allocated, not initialised. Raises ConfigError when
    heads, kv heads or ffn_dim cannot be spread over the size of `comm`. `layer` keeps dropout masks of blocks apart.
    """

    def __init__(self, args: BlockArgs, comm: TpComm, *, layer: int = 0) -> None:
        super().__init__()
        args.check_tp(comm.size)
        site = layer * _SITES_PER_BLOCK
        self.tp_size = comm.size
        self.dim = args.dim
        self.fast_path: Callable[..., Any] | None = None
        self.exchange: Exchange | None = None
        self.entry = Entry(args, comm)
        self.sequence_parallel = args.sequence_parallel
        self.attention_norm = _norm(args, comm, affine=args.norm_affine)
        self.attention = Attention(args, comm)
        self.cross_norm: RMSNorm | LayerNorm | None = None
        self.cross_attention: CrossAttention | None = None
        if args.cross_attention:
            self.cross_norm, self.cross_attention = _norm(args, comm, affine=True), CrossAttention(args, comm)
        self.mlp_norm = _norm(args, comm, affine=args.norm_affine)
        mlp = GeluMLP if args.style == "wan" else SwiGLU
        self.mlp: GeluMLP | SwiGLU = mlp(args, comm, site=site)
        self.modulation: Modulation | None = None
        if args.modulation:
            dtype = getattr(torch, args.dtype)
            self.modulation = Modulation(args.dim, dtype=dtype, sequence_parallel=args.sequence_parallel, comm=comm)
        tokens_dim = 0 if args.sequence_parallel else None
        self.attention_dropout = Dropout(args.dropout, site=site + 1, comm=comm, sharded_dim=tokens_dim)
        self.mlp_dropout = Dropout(args.dropout, site=site + 2, comm=comm, sharded_dim=tokens_dim)

    def forward(
        self,
        x_BSD: Tensor,
        cos_SR: Tensor,
        sin_SR: Tensor,
        modulation_B6D: Tensor | None = None,
        context: Tensor | KeysValues | None = None,
        mask: Tensor | None = None,
        seed: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        positions_S: Tensor | None = None,
        branch_BSD: Tensor | None = None,
        following: Entry | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[B, S, D], [S, E / 2], [S, E / 2] -> [B, S, D], replicated; sequence parallel: [s, B, D] -> [s, B, D].

        Arguments as `BlockInputs`; `cache` and `positions_S` as `Attention`. `branch_BSD` is what the block before has
        left for the entry of this one to add, and `following` the entry that adds what this one leaves: then two
        tensors are returned, x and that.
        """
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulated(modulation_B6D)
        if branch_BSD is None:
            h_BSD = _normed(self.attention_norm, x_BSD, shift, scale)
        else:
            x_BSD, h_BSD = self.entry(x_BSD, branch_BSD, self.attention_norm)
        options = {"mask": mask, "cache": cache, "positions_S": positions_S, "reduce": self.exchange is None}
        h_BSD = self.attention(h_BSD, cos_SR, sin_SR, **options)
        h_BSD = self.attention_dropout(h_BSD, seed)
        if self.cross_attention is not None and self.cross_norm is not None:
            assert context is not None, "a block with cross-attention needs a context"
            x_BSD = _joined(x_BSD, h_BSD, gate)
            h_BSD, gate = self.cross_attention(self.cross_norm(x_BSD), context), None
        x_BSD, h_BSD = self.joined_and_normed(x_BSD, h_BSD, gate, mlp_shift, mlp_scale)
        if following is None:
            return _joined(x_BSD, self.mlp_dropout(self.mlp(h_BSD, seed), seed), mlp_gate)
        if following.exchange is None:
            return x_BSD, self.mlp(h_BSD, seed)
        return _with_bias(x_BSD, self.mlp.down), self.mlp(h_BSD, seed, reduce=False)

    def modulated(self, modulation_B6D: Tensor | None) -> tuple[Tensor | None, ...]:
        """Shift, scale and gate of attention, then of the MLP; six times None without a modulation."""
        if self.modulation is None:
            return (None,) * 6
        assert modulation_B6D is not None, "a block with modulation needs modulation_B6D"
        six: tuple[Tensor, ...] = self.modulation(modulation_B6D)
        return six

    def site(self, batch: int, seq_len: int) -> Site | None:
        """The residual add before the MLP and the norm after it; where nothing is between, the all-reduce before."""
        dtype = self.attention.wqkv.weight.dtype
        has_weight = self.mlp_norm.weight is not None
        if self.modulation is not None:
            is_plain = isinstance(self.mlp_norm, LayerNorm) and not has_weight
            is_place = is_plain and not self.sequence_parallel
            return Site("add_modulated_norm", ((batch, seq_len, self.dim),), dtype=dtype) if is_place else None
        if not isinstance(self.mlp_norm, RMSNorm) or not has_weight:
            return None
        tokens = seq_len // self.tp_size if self.sequence_parallel else seq_len
        is_between = self.attention_dropout.p > 0 or self.cross_attention is not None
        adds_the_sum = not is_between and not self.sequence_parallel
        exchanging = "all_reduce_add_rms_norm" if adds_the_sum else ""
        shapes = ((batch, tokens, self.dim),)
        return Site("add_rms_norm", shapes, dtype=dtype, exchanging=exchanging, comm=self.attention.wo.comm)

    def joined_and_normed(
        self, x_BSD: Tensor, branch_BSD: Tensor, gate: Tensor | None, shift: Tensor | None, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x + branch * gate, and the norm of it for the MLP."""
        if self.fast_path is None:
            x_BSD = _joined(x_BSD, branch_BSD, gate)
            return x_BSD, _normed(self.mlp_norm, x_BSD, shift, scale)
        if isinstance(self.mlp_norm, RMSNorm):
            if self.exchange is not None:
                x_BSD = _with_bias(x_BSD, self.attention.wo)
            return _by_fast_path(self, x_BSD, branch_BSD, self.mlp_norm)
        assert shift is not None and scale is not None, "site() asks for a modulation"
        gates = torch.ones_like(scale) if gate is None else gate
        modulation = gates.squeeze(1), shift.squeeze(1), scale.squeeze(1)
        return self.fast_path(x_BSD, branch_BSD, *modulation, eps=self.mlp_norm.eps)

    def declared(
        self,
        x_shape: Sequence[int],
        context_shape: Sequence[int],
        dtype: torch.dtype,
        *,
        following: Entry | None = None,
    ) -> Declared:
        """Collectives for full shapes of the input and of the context, forward and backward apart."""
        batch = x_shape[1] if self.sequence_parallel else x_shape[0]
        total = Declared() if self.modulation is None else self.modulation.declared(batch, dtype)
        attention = self.attention.declared(x_shape, dtype, reduce=self.exchange is None)
        total = total.then(self.attention_norm.declared(dtype)).then(attention)
        if self.cross_attention is not None and self.cross_norm is not None:
            total = total.then(self.cross_norm.declared(dtype))
            total = total.then(self.cross_attention.declared(x_shape, context_shape, dtype))
        reduce = following is None or following.exchange is None
        return total.then(self.mlp_norm.declared(dtype)).then(self.mlp.declared(x_shape, dtype, reduce=reduce))


class Modulation(nn.Module):
    """adaLN: table [1, 6, D] + embedding [B, 6, D] -> six tensors that broadcast over the tokens, in float32, as Wan.

    Order: shift, scale, gate of attention, then of the MLP. In the sequence-parallel form every rank modulates
    different tokens, so the gradient of the sum is partial: it enters the region here, once for table and embedding.
    """

    def __init__(
        self, width: int, *, dtype: torch.dtype = torch.float32, sequence_parallel: bool = False, comm: TpComm
    ) -> None:
        super().__init__()
        self.comm = comm
        self.sequence_parallel = sequence_parallel
        self.table = nn.Parameter(torch.empty(1, 6, width, dtype=dtype))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Replicated."""
        return {"table": ShardSpec()}

    def forward(self, embedding_B6D: Tensor) -> tuple[Tensor, ...]:
        """[B, 6, D] -> six of [B, 1, D]; sequence parallel: six of [1, B, D]."""
        dtype = stat_dtype(embedding_B6D.dtype)
        sum_B6D = self.table.to(dtype) + embedding_B6D.to(dtype)
        if self.sequence_parallel:
            sum_B6D = self.comm.copy_to_tp(sum_B6D)  # identity; gradient partial -> replicated
        tokens_dim = 0 if self.sequence_parallel else 1
        return tuple(part_BD.unsqueeze(tokens_dim) for part_BD in sum_B6D.unbind(1))

    def declared(self, batch: int, dtype: torch.dtype) -> Declared:
        """Backward of the sequence-parallel form: the sum of the gradients."""
        shape = (batch, 6, self.table.shape[-1])
        return entered(shape, stat_dtype(dtype)) if self.sequence_parallel else Declared()


class Entry(nn.Module):
    """The place between two blocks: the residual add of the MLP of one, the all-reduce before it, the norm after it.

    Blocks use it where `use_fast_paths` has put a fast path there; where it has not, each adds what its own MLP gives.
    """

    def __init__(self, args: BlockArgs, comm: TpComm) -> None:
        super().__init__()
        self.fast_path: Callable[..., Any] | None = None
        self.exchange: Exchange | None = None
        self._comm, self._dim, self._dtype = comm, args.dim, getattr(torch, args.dtype)
        has_weight = args.norm == "rms" and args.norm_affine
        self._is_place = has_weight and not (args.modulation or args.sequence_parallel or args.dropout)

    def site(self, batch: int, seq_len: int) -> Site | None:
        """The residual add and the norm, with the all-reduce before them."""
        if not self._is_place:
            return None
        shapes = ((batch, seq_len, self._dim),)
        exchanging = "all_reduce_add_rms_norm"
        return Site("add_rms_norm", shapes, dtype=self._dtype, exchanging=exchanging, comm=self._comm)

    def forward(self, x_BSD: Tensor, branch_BSD: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """x + branch, summed over the ranks where there is an exchange, and its norm: twice [B, S, D]."""
        return _by_fast_path(self, x_BSD, branch_BSD, norm)


class TransformerStack(nn.Module):
    """`num_layers` blocks in a row: the callable that is compiled.

    Input and output are replicated [B, S, D] in every form; the sequence-parallel form shards the tokens after it
    entered and gathers them before it leaves, and raises ConfigError when tp does not divide S.
    """

    def __init__(self, args: BlockArgs, comm: TpComm, *, num_layers: int) -> None:
        super().__init__()
        self.comm = comm
        self.dim = args.dim
        self.sequence_parallel = args.sequence_parallel
        self.layers = nn.ModuleList(TransformerBlock(args, comm, layer=i) for i in range(num_layers))

    def forward(
        self,
        x_BSD: Tensor,
        cos_SR: Tensor,
        sin_SR: Tensor,
        modulation_B6D: Tensor | None = None,
        context: Tensor | Sequence[KeysValues] | None = None,
        mask: Tensor | None = None,
        seed: Tensor | None = None,
        *,
        caches: Sequence[KVCache] | None = None,
        positions_S: Tensor | None = None,
    ) -> Tensor:
        """[B, S, D], [S, E / 2], [S, E / 2] -> [B, S, D], replicated; arguments as `BlockInputs`, a cache per block."""
        if self.sequence_parallel:
            x_BSD = self.comm.scatter(x_BSD.transpose(0, 1), dim=0, src="I")  # tokens sharded, before the batch
        branch_BSD = None
        for i, layer in enumerate(self.layers):
            own = context if context is None or isinstance(context, Tensor) else context[i]
            following = self._entry_after(i)
            options = {"cache": None if caches is None else caches[i], "positions_S": positions_S}
            options |= {"branch_BSD": branch_BSD, "following": following}
            found = layer(x_BSD, cos_SR, sin_SR, modulation_B6D, own, mask, seed, **options)
            x_BSD, branch_BSD = (found, None) if following is None else found
        if self.sequence_parallel:
            x_BSD = self.comm.all_gather(x_BSD, dim=0, dst="I").transpose(0, 1)  # tokens replicated
        return x_BSD

    def _entry_after(self, number: int) -> Entry | None:
        """The entry of the next block, where it has a fast path."""
        if number + 1 == len(self.layers):
            return None
        entry: Entry = self.layers[number + 1].entry
        return None if entry.fast_path is None else entry

    def project_context(self, context_BTD: Tensor) -> list[KeysValues]:
        """Keys and values of every block's cross-attention, to be passed as `context` in many calls."""
        return [layer.cross_attention.project(context_BTD) for layer in self.layers]

    def declared_collectives(
        self, batch: int, seq_len: int, dtype: torch.dtype | str, train: bool, *, context_len: int | None = None
    ) -> tuple[Collective, ...]:
        """Collectives mode C issues for an input [batch, seq_len, D], forward then (if `train`) backward, in order.

        `dtype` is a torch dtype or its name; a context has `context_len` tokens, by default `seq_len`, and is not
        projected yet. All inputs that are activations need a gradient when training. Empty when the group has size 1.
        """
        if self.comm.size == 1:
            return ()
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        shape = (seq_len, batch, self.dim) if self.sequence_parallel else (batch, seq_len, self.dim)
        context_shape = (batch, context_len or seq_len, self.dim)
        total = Declared()
        if self.sequence_parallel:
            total = scattered(shape, dtype, tp=self.comm.size, summed=False)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, TransformerBlock), type(layer)
            total = total.then(layer.declared(shape, context_shape, dtype, following=self._entry_after(i)))
        if self.sequence_parallel:
            total = total.then(gathered(shape, dtype, tp=self.comm.size, dst="I"))
        return total.select(train=train)


def _norm(args: BlockArgs, comm: TpComm, *, affine: bool) -> RMSNorm | LayerNorm:
    dtype = getattr(torch, args.dtype)
    tokens_over = comm if args.sequence_parallel else None
    if args.norm == "layer":
        return LayerNorm(args.dim, eps=args.eps, affine=affine, dtype=dtype, tokens_over=tokens_over)
    return RMSNorm(args.dim, eps=args.eps, affine=affine, dtype=dtype, tokens_over=tokens_over)


def _normed(norm: nn.Module, x_BSD: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    """norm(x) * (1 + scale) + shift, in the dtype of the modulation and cast back once; norm(x) without one."""
    if shift is None or scale is None:
        return norm(x_BSD)
    y_BSD = norm(x_BSD.to(scale.dtype)) * (1 + scale) + shift
    return y_BSD.to(x_BSD.dtype)


def _joined(x_BSD: Tensor, branch_BSD: Tensor, gate: Tensor | None) -> Tensor:
    """x + branch * gate, in the dtype of the modulation and cast back; x + branch without one."""
    if gate is None:
        return x_BSD + branch_BSD
    y_BSD = x_BSD.to(gate.dtype) + branch_BSD.to(gate.dtype) * gate
    return y_BSD.to(x_BSD.dtype)


def _by_fast_path(place: TransformerBlock | Entry, x_BSD: Tensor, branch_BSD: Tensor, norm: RMSNorm) -> Any:
    assert place.fast_path is not None, "it is asked for where there is one"
    options = {} if place.exchange is None else {"exchange": place.exchange}
    return place.fast_path(x_BSD, branch_BSD, norm.entered_weight(), eps=norm.eps, **options)


def _with_bias(x_BSD: Tensor, linear: RowParallelLinear) -> Tensor:
    """The bias of a linear whose output an exchange sums, added to what the sum is added to: once, not on each rank."""
    return x_BSD if linear.bias is None else x_BSD + linear.bias
