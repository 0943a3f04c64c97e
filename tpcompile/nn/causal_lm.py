"""Token ids -> logits, loss or further tokens: a whole language model of the Llama form, sharded end to end."""

# B batch, S sequence, T places in the cache, D model width, V vocabulary, R = head size / 2 rotary pairs
# v = V / tp columns of this rank; sequence parallel: s = S / tp, tokens before batch
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.block_args import BlockArgs
from tpcompile.collectives.strategies import TpComm
from tpcompile.errors import ConfigError
from tpcompile.nn.attention import HeadLayout
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.cache import KVCache
from tpcompile.nn.embedding import ParallelEmbedding, ParallelLMHead
from tpcompile.nn.loss import vocab_parallel_cross_entropy
from tpcompile.nn.norm import RMSNorm


class CausalLM(nn.Module):
    """Embedding, stack of blocks, final RMSNorm, projection to the vocabulary; unsharded with a `comm` of size 1.

    Embedding and projection are sharded over the vocabulary; uneven="pad" pads it where tp does not divide it. With
    `tied` they share one Parameter, `embedding.weight`. RoPE tables are inputs: see `examples.checkpoints`.
    In the sequence-parallel form activations are sharded over tokens from the embedding to the projection, and S must
    be divisible by tp. Weights are allocated, not initialised. Raises ConfigError for a block of a different form.
    """

    def __init__(self, args: BlockArgs, comm: TpComm, *, num_layers: int, vocab_size: int, tied: bool = False) -> None:
        super().__init__()
        wanted = {"norm": "rms", "causal": True, "modulation": False, "cross_attention": False}
        bad = [f"{name}={getattr(args, name)!r}" for name, value in wanted.items() if getattr(args, name) != value]
        if bad:
            raise ConfigError(f"a CausalLM cannot be built with {', '.join(bad)}; it needs {wanted}")
        dtype = getattr(torch, args.dtype)
        options = {
            "comm": comm, "dtype": dtype, "pad": args.uneven == "pad", "sequence_parallel": args.sequence_parallel,
        }  # fmt: skip
        tokens_over = comm if args.sequence_parallel else None
        self.comm = comm
        self.vocab_size = vocab_size
        self.sequence_parallel = args.sequence_parallel
        self.cache_heads = HeadLayout.of(args, comm.size).kv.share(comm.size) // args.head_dim
        self.head_dim = args.head_dim
        self.embedding = ParallelEmbedding(vocab_size, args.dim, **options)
        self.stack = TransformerStack(args, comm, num_layers=num_layers)
        self.norm = RMSNorm(args.dim, eps=args.eps, dtype=dtype, tokens_over=tokens_over)
        self.head = ParallelLMHead(args.dim, vocab_size, **options)
        if tied:
            self.head.tie(self.embedding)

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> CausalLM:
        """`nn.Module.to_empty`, and tie the weights again: torch gives every module a Parameter of its own."""
        super().to_empty(device=device, recurse=recurse)
        if self.head.tied:
            self.head.tie(self.embedding)
        return self

    def forward(
        self,
        ids_BS: Tensor,
        cos_SR: Tensor,
        sin_SR: Tensor,
        *,
        mask: Tensor | None = None,
        seed: Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
        positions_S: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """[B, S] int64, [S, E / 2], [S, E / 2] -> this rank's columns of the logits, [B, S, V / tp].

        `mask`, `seed`, `caches` and `positions_S` as `TransformerStack`; `last_only` projects the last token alone,
        [B, 1, V / tp]. Raises ConfigError for `caches` or `last_only` in the sequence-parallel form.
        """
        if self.sequence_parallel:
            if caches is not None or last_only:
                raise ConfigError("one token cannot be sharded; decode in a model without sequence_parallel")
            x_sBD = self.embedding(ids_BS.t())  # partial -> tokens sharded, before the batch
            for layer in self.stack.layers:  # not the stack: it would scatter what is sharded already
                x_sBD = layer(x_sBD, cos_SR, sin_SR, mask=mask, seed=seed)
            return self.head(self.norm(x_sBD)).transpose(0, 1)
        x_BSD = self.embedding(ids_BS)
        x_BSD = self.stack(x_BSD, cos_SR, sin_SR, mask=mask, seed=seed, caches=caches, positions_S=positions_S)
        return self.head(self.norm(x_BSD[:, -1:] if last_only else x_BSD))

    def logits(self, ids_BS: Tensor, cos_SR: Tensor, sin_SR: Tensor, **options: Any) -> Tensor:
        """Arguments as `forward` -> all logits on every rank, [B, S, V], for work that the ranks repeat."""
        return self.head.gather(self(ids_BS, cos_SR, sin_SR, **options))

    def loss(self, ids_BS: Tensor, targets_BS: Tensor, cos_SR: Tensor, sin_SR: Tensor, **options: Any) -> Tensor:
        """Mean cross-entropy over all targets that are not -100, a scalar, the same on all ranks.

        `targets_BS` [B, S] int64 is the token expected after each place: the caller shifts. `options` as `forward`.
        """
        logits_BSv = self(ids_BS, cos_SR, sin_SR, **options)
        return vocab_parallel_cross_entropy(
            logits_BSv.flatten(0, 1), targets_BS.flatten(), comm=self.comm, vocab_size=self.vocab_size
        )

    def new_caches(self, batch: int, max_len: int) -> list[KVCache]:
        """An empty cache per block, for `max_len` tokens."""
        weight = self.embedding.weight
        options = {"dtype": weight.dtype, "device": weight.device}
        return [KVCache(batch, max_len, self.cache_heads, self.head_dim, **options) for _ in self.stack.layers]

    def next_tokens(self, ids_BS: Tensor, cos_SR: Tensor, sin_SR: Tensor, **options: Any) -> Tensor:
        """Arguments as `forward` -> the likeliest token after the last, [B, 1] int64, equal on all ranks."""
        return self.head.gather(self(ids_BS, cos_SR, sin_SR, last_only=True, **options)).argmax(-1)

    @torch.no_grad()
    def generate(
        self,
        ids_BS: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        *,
        num_new_tokens: int,
        is_token_BS: Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
        step: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Continue every prompt with the likeliest tokens: [B, S] -> [B, S + num_new_tokens], equal on all ranks.

        One call for the prompt, then one per token; `model.compile()` before makes that two graphs, or one when the
        prompt is one token, and passing the same `caches` again reuses them. `step` makes the calls for single tokens,
        e.g. `tpcompile.run(model.next_tokens, "graphed")`, which captures a CUDA graph for each `caches`. Prompts of
        different length are padded on the left, as `left_padded` does, and `is_token_BS` is False in the padding: no
        token looks there, and RoPE takes differences of positions only. Nothing stops early. Tables cover
        T >= S + num_new_tokens positions. Raises ConfigError when they do not, for padding elsewhere than on the left,
        when the caches are too short, and for a sequence-parallel model.
        """
        _check_prompts(ids_BS, is_token_BS)
        batch, length = ids_BS.shape
        total = length + num_new_tokens
        if len(cos_TR) < total or len(sin_TR) < total:
            raise ConfigError(
                f"RoPE tables have {len(cos_TR)} positions; {length} + {num_new_tokens} tokens need {total}"
            )
        caches = self.new_caches(batch, total) if caches is None else caches
        for cache in caches:
            cache.check_room(total)
            cache.reset()
        is_key_BT = None if is_token_BS is None else F.pad(is_token_BS, (0, caches[0].max_len - length), value=True)
        tokens_BT = F.pad(ids_BS, (0, num_new_tokens))
        next_tokens, new_BS, start = self.next_tokens, ids_BS, 0
        for stop in range(length, total):
            here = slice(start, stop)
            positions_S = torch.arange(start, stop, device=ids_BS.device)
            mask = None
            if is_key_BT is not None:  # padding looks at itself, because a softmax over nothing is NaN
                is_itself_ST = torch.arange(is_key_BT.shape[1], device=ids_BS.device) == positions_S.unsqueeze(1)
                mask = (is_key_BT.unsqueeze(1) | is_itself_ST).unsqueeze(1)
            new_BS = next_tokens(new_BS, cos_TR[here], sin_TR[here], mask=mask, caches=caches, positions_S=positions_S)
            tokens_BT[:, stop : stop + 1] = new_BS  # copied: the next replay of a CUDA graph overwrites its outputs
            next_tokens, start = step or self.next_tokens, stop
        return tokens_BT


def left_padded(prompts: Sequence[Tensor], *, pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts [S1], [S2], ... int64 -> ids [B, S] with `pad_id` on the left, and bool [B, S], False in the padding.

    Raises ConfigError for a prompt without a token or with more than one dim.
    """
    shapes = [tuple(prompt.shape) for prompt in prompts]
    wrong = [shape for shape in shapes if len(shape) != 1 or shape == (0,)]
    if wrong or not shapes:
        raise ConfigError(f"prompts have shapes {wrong}; pass one or more tensors [S] of at least one token each")
    length = max(map(len, prompts))
    ids, is_token = [], []
    for prompt in prompts:
        padding = (length - len(prompt), 0)
        ids.append(F.pad(prompt, padding, value=pad_id))
        is_token.append(F.pad(torch.ones_like(prompt, dtype=torch.bool), padding))
    return torch.stack(ids), torch.stack(is_token)


def _check_prompts(ids_BS: Tensor, is_token_BS: Tensor | None) -> None:
    """Reads the mask, once for a call: what it refuses gives wrong text without an error."""
    if not isinstance(ids_BS, Tensor) or ids_BS.dim() != 2:
        shape = tuple(ids_BS.shape) if isinstance(ids_BS, Tensor) else type(ids_BS).__name__
        raise ConfigError(f"prompts are {shape}, not a tensor [B, S]; for different lengths pass left_padded(prompts)")
    if is_token_BS is None:
        return
    if is_token_BS.shape != ids_BS.shape or is_token_BS.dtype != torch.bool:
        raise ConfigError(
            f"is_token_BS is {is_token_BS.dtype} {tuple(is_token_BS.shape)}; pass bool {tuple(ids_BS.shape)}, True for "
            "tokens"
        )
    is_padded_right = is_token_BS[:, :-1] & ~is_token_BS[:, 1:]
    bad = is_padded_right.any(1) | ~is_token_BS[:, -1]
    if bad.any():
        rows = bad.nonzero().flatten().tolist()
        raise ConfigError(f"prompts {rows} have padding after a token; pad on the left, see left_padded")
