"""Normalised activations and rotary tables -> attention output, heads sharded over the TP group.

kv heads: with more ranks than kv heads, neighbouring ranks have the same kv head (`BlockArgs.kv_replicas`). A number
of heads that tp does not divide is padded with heads of zeros where the arguments allow it: their q, k, v and gradients
are zero, and all ranks keep equal graphs.
"""

# B batch, S sequence, T keys (context or cache), D model width, H query heads, G kv heads, E head size, R = E / 2
# h and g: query and kv heads on this rank; d = h * E, c = g * E. Sequence parallel: s = S / tp, tokens before batch
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpcompile.block_args import BlockArgs
from tpcompile.collectives.strategies import TpComm
from tpcompile.errors import ConfigError
from tpcompile.fastpath.plain import rotate
from tpcompile.layout import Part
from tpcompile.nn.cache import KVCache
from tpcompile.nn.fast_paths import Site
from tpcompile.nn.linear import ColumnParallelLinear, PackedColumnLinear, RowParallelLinear
from tpcompile.nn.norm import DistributedQKNorm, DistributedRMSNorm, PerHeadQKNorm, PerHeadRMSNorm
from tpcompile.nn.sharding import Declared
from tpcompile.torch_api.compiler import sdpa_choice

if TYPE_CHECKING:
    from tpcompile.fastpath.kernels.exchange_memory import Exchange  # imports Triton

KeysValues = tuple[Tensor, Tensor]
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


@dataclass(frozen=True)
class HeadLayout:
    """How the heads of one attention are spread over the ranks."""

    q: Part
    kv: Part

    @staticmethod
    def of(args: BlockArgs, tp: int) -> HeadLayout:
        """Query heads stay with the kv head they read, or its replicas share them. Raises ConfigError as check_tp."""
        args.check_tp(tp)
        size, pads = args.head_dim, args.uneven == "pad"
        replicas = args.kv_replicas(tp)
        group = args.num_heads // args.num_kv_heads if replicas == 1 else 1
        q = Part(args.num_heads * size, unit=group * size, padded=pads and replicas == 1)
        kv = Part(args.num_kv_heads * size, unit=size, replicas=replicas, padded=pads and replicas == 1)
        return HeadLayout(q, kv)


class _Attention(nn.Module):
    """What both attentions take from the arguments: the layout of the heads, and how they are attended to."""

    def __init__(self, args: BlockArgs, comm: TpComm) -> None:
        super().__init__()
        self.heads = HeadLayout.of(args, comm.size)
        self.dtype = getattr(torch, args.dtype)
        self.head_dim = args.head_dim
        self.backend = args.attention_backend
        self.grouped = self.heads.q.share(comm.size) != self.heads.kv.share(comm.size)
        self.sequence_parallel = args.sequence_parallel

    def _split(self, x_BSd: Tensor) -> Tensor:
        """[B, S, h * E] -> [B, S, h, E]; sequence parallel: [S, B, h * E] -> [B, S, h, E]."""
        return _tokens_first(x_BSd.unflatten(-1, (-1, self.head_dim)), self.sequence_parallel)

    def _joined(self, q_BShE: Tensor, keys_values: KeysValues, *, mask: Tensor | None, causal: bool) -> Tensor:
        """Attention of every head -> [B, S, h * E]; sequence parallel: [S, B, h * E]."""
        o_BShE = attend(q_BShE, keys_values, mask=mask, causal=causal, grouped=self.grouped, backend=self.backend)
        return _tokens_first(o_BShE, self.sequence_parallel).flatten(2)


class Attention(_Attention):
    """Self-attention with packed q, k, v, RoPE, and grouped-query heads: [B, S, D] -> [B, S, D] replicated.

    Sequence parallel: [s, B, D] -> [s, B, D]. Query head j reads kv head j * G // H. Raises ConfigError when the heads
    cannot be spread over tp.
    """

    def __init__(self, args: BlockArgs, comm: TpComm) -> None:
        super().__init__(args, comm)
        heads, dtype = self.heads, self.dtype
        self.causal = args.causal
        self.interleaved = args.rope == "interleaved"
        options = {"bias": args.bias, "comm": comm, "dtype": dtype, "sequence_parallel": args.sequence_parallel}
        self.wqkv = PackedColumnLinear(args.dim, (heads.q, heads.kv, heads.kv), **options)
        self.qk_norm: DistributedQKNorm | PerHeadQKNorm | None = None
        if args.qk_norm == "full":
            self.qk_norm = DistributedQKNorm(heads.q, heads.kv, eps=args.eps, comm=comm, dtype=dtype)
        elif args.qk_norm == "per_head":
            self.qk_norm = PerHeadQKNorm(args.head_dim, eps=args.eps, comm=comm, dtype=dtype)
        self.wo = RowParallelLinear(heads.q, args.dim, **options)
        self.widths = (heads.q.share(comm.size), heads.kv.share(comm.size))
        self.fast_path: Callable[..., Any] | None = None
        self.takes_packed = False
        self.exchange: Exchange | None = None

    def site(self, batch: int, seq_len: int) -> Site | None:
        """Norms and RoPE of q and k; not in the sequence-parallel form, whose tokens are before the batch."""
        if self.qk_norm is None or self.sequence_parallel:
            return None
        shapes = (*((batch, seq_len, width) for width in self.widths), (seq_len, self.head_dim // 2))
        dtype = self.qk_norm.q_norm.weight.dtype
        variant = "interleaved" if self.interleaved else ""
        if not isinstance(self.qk_norm, DistributedQKNorm):
            return Site(self.qk_norm.path, shapes, variant, dtype)
        norm = self.qk_norm
        return Site(norm.path, shapes, variant, dtype, f"{norm.path}_exchange", alone=norm.alone, comm=norm.comm)

    def forward(
        self,
        x_BSD: Tensor,
        cos_SR: Tensor,
        sin_SR: Tensor,
        *,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        positions_S: Tensor | None = None,
        reduce: bool = True,
    ) -> Tensor:
        """[B, S, D], [S, E / 2], [S, E / 2] -> [B, S, D]; this rank's part of it, without the bias, unless `reduce`.

        `mask` broadcasts to [B, 1, S, T], True where a query may look, or is added to the logits when it is float. With
        a `cache` the S tokens are at `positions_S` [S] int64, and look at all cached tokens up to their own.
        """
        q_BShE, k_BSgE, v_BSgE = self._projected(self.wqkv.multiplied(x_BSD), cos_SR, sin_SR)
        causal = self.causal
        if cache is not None:
            assert positions_S is not None, "a cache needs the positions of the tokens"
            k_BSgE, v_BSgE = cache.update(k_BSgE, v_BSgE, positions_S)
            mask, causal = _both(cache.mask(positions_S), mask), False
        elif causal and mask is not None:
            tokens = q_BShE.shape[1]
            is_past_SS = torch.ones(tokens, tokens, dtype=torch.bool, device=q_BShE.device).tril()
            mask, causal = _both(is_past_SS, mask), False
        o_BSd = self._joined(q_BShE, (k_BSgE, v_BSgE), mask=mask, causal=causal)
        return self.wo(o_BSd) if reduce else self.wo.partial(o_BSd)

    def declared(self, x_shape: Sequence[int], dtype: torch.dtype, *, reduce: bool = True) -> Declared:
        """Collectives for an input whose full shape is `x_shape`; none for what an exchange sums."""
        total = self.wqkv.declared(x_shape, dtype)
        if self.qk_norm is not None and self.exchange is None:
            total = total.then(self.qk_norm.declared(x_shape, dtype))
        return total.then(self.wo.declared(x_shape, dtype)) if reduce else total

    def _projected(self, qkv_BSp: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v, of which q and k are normalised and rotated: [B, S, h, E], and twice [B, S, g, E]."""
        layout = {"interleaved": self.interleaved}
        if self.takes_packed:
            assert isinstance(self.qk_norm, DistributedQKNorm) and self.fast_path is not None
            q_BhSE, k_BgSE, v_BgSE = self.qk_norm.rotated_packed(qkv_BSp, cos_SR, sin_SR, self.fast_path, **layout)
            return q_BhSE.transpose(1, 2), k_BgSE.transpose(1, 2), v_BgSE.transpose(1, 2)
        q_BSd, k_BSc, v_BSc = qkv_BSp.split(self.wqkv.local_parts, dim=-1)
        v_BSgE = self._split(v_BSc)
        if self.qk_norm is not None and self.fast_path is not None:
            options = layout if self.exchange is None else layout | {"exchange": self.exchange}
            q_BhSE, k_BgSE = self.qk_norm.rotated(q_BSd, k_BSc, cos_SR, sin_SR, self.fast_path, **options)
            return q_BhSE.transpose(1, 2), k_BgSE.transpose(1, 2), v_BSgE
        if self.qk_norm is not None:
            q_BSd, k_BSc = self.qk_norm(q_BSd, k_BSc)
        q_BShE, k_BSgE = self._split(q_BSd), self._split(k_BSc)
        return rotate(q_BShE, cos_SR, sin_SR, **layout), rotate(k_BSgE, cos_SR, sin_SR, **layout), v_BSgE


class CrossAttention(_Attention):
    """Attention of [B, S, D] to a context [B, T, D], whose keys and values can be computed once and kept.

    No RoPE, no mask unless given; norms of q and k as the arguments say, each with its own statistic. The context is
    replicated in the sequence-parallel form too. Raises ConfigError as Attention.
    """

    def __init__(self, args: BlockArgs, comm: TpComm) -> None:
        super().__init__(args, comm)
        heads, dtype, sp = self.heads, self.dtype, self.sequence_parallel
        options = {"bias": args.bias, "comm": comm, "dtype": dtype}
        self.wq = ColumnParallelLinear(args.dim, heads.q, sequence_parallel=sp, **options)
        self.wkv = PackedColumnLinear(args.dim, (heads.kv, heads.kv), **options)
        self.q_norm = _norm(args, heads.q, comm, dtype)
        self.k_norm = _norm(args, heads.kv, comm, dtype)
        self.wo = RowParallelLinear(heads.q, args.dim, sequence_parallel=sp, **options)

    def project(self, context_BTD: Tensor) -> KeysValues:
        """Keys and values of a context, [B, T, g, E] each: pass them to `forward` instead of the context."""
        k_BTc, v_BTc = self.wkv(context_BTD)
        if self.k_norm is not None:
            k_BTc = self.k_norm(k_BTc)
        return k_BTc.unflatten(-1, (-1, self.head_dim)), v_BTc.unflatten(-1, (-1, self.head_dim))

    def forward(self, x_BSD: Tensor, context: Tensor | KeysValues, *, mask: Tensor | None = None) -> Tensor:
        """[B, S, D] and [B, T, D] or `project` of it -> [B, S, D]; `mask` broadcasts to [B, 1, S, T]."""
        keys_values = self.project(context) if isinstance(context, Tensor) else context
        q_BSd = self.wq(x_BSD)
        if self.q_norm is not None:
            q_BSd = self.q_norm(q_BSd)
        return self.wo(self._joined(self._split(q_BSd), keys_values, mask=mask, causal=False))

    def declared(self, x_shape: Sequence[int], context_shape: Sequence[int], dtype: torch.dtype) -> Declared:
        """Collectives for full shapes of the input and of a context that is not projected yet."""
        total = self.wkv.declared(context_shape, dtype)
        if self.k_norm is not None:
            total = total.then(self.k_norm.declared(context_shape, dtype))
        total = total.then(self.wq.declared(x_shape, dtype))
        if self.q_norm is not None:
            total = total.then(self.q_norm.declared(x_shape, dtype))
        return total.then(self.wo.declared(x_shape, dtype))


def attend(
    q_BShE: Tensor, keys_values: KeysValues, *, mask: Tensor | None, causal: bool, grouped: bool, backend: str = "auto"
) -> Tensor:
    """softmax(q k / sqrt(E)) v per head: [B, S, h, E], [B, T, g, E] twice -> [B, S, h, E].

    `backend` as in BlockArgs. Raises ConfigError for one that cannot take these tensors; compiled code, RuntimeError.
    """
    qkv = tuple(t.transpose(1, 2) for t in (q_BShE, *keys_values))
    options = {"attn_mask": mask, "is_causal": causal, "enable_gqa": grouped}
    if backend == "auto" or q_BShE.dtype == torch.float64:
        return F.scaled_dot_product_attention(*qkv, **options).transpose(1, 2)
    with sdpa_kernel(_BACKENDS[backend]):
        if not torch.compiler.is_compiling():
            _check_backend(backend, qkv, options)
        o_BhSE = F.scaled_dot_product_attention(*qkv, **options)
    return o_BhSE.transpose(1, 2)


def _check_backend(backend: str, qkv: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    """Raise ConfigError where the one backend that `sdpa_kernel` allows here cannot take these tensors."""
    try:
        found = sdpa_choice(*qkv, **options)
    except RuntimeError:  # none can
        found = ""
    if found != _BACKENDS[backend].name:
        q, k, _ = qkv
        raise ConfigError(
            f"attention_backend={backend} cannot take {q.dtype} {list(q.shape)} and {list(k.shape)} on {q.device.type}"
            f"{' with a mask' if options['attn_mask'] is not None else ''}; choose a different one, or auto"
        )


def _norm(args: BlockArgs, width: Part, comm: TpComm, dtype: torch.dtype) -> DistributedRMSNorm | PerHeadRMSNorm | None:
    if args.qk_norm == "none":
        return None
    if args.qk_norm == "per_head":
        return PerHeadRMSNorm(args.head_dim, eps=args.eps, comm=comm, dtype=dtype)
    return DistributedRMSNorm(width, eps=args.eps, comm=comm, dtype=dtype)


def _tokens_first(x: Tensor, is_swapped: bool) -> Tensor:
    """[S, B, ...] <-> [B, S, ...] in the sequence-parallel form, which has tokens before batch outside of attention."""
    return x.transpose(0, 1) if is_swapped else x


def _both(allowed: Tensor, mask: Tensor | None) -> Tensor:
    """Both masks; `allowed` is boolean, `mask` boolean or added to the logits."""
    if mask is None:
        return allowed
    return allowed & mask if mask.dtype == torch.bool else mask.masked_fill(~allowed, float("-inf"))
