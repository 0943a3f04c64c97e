"""Vocabulary-sharded logits and targets -> cross-entropy, without gathering the logits.

Two collectives of [N] numbers each instead of one of [N, V]: the maximum, without a gradient, then everything that is
a sum over the vocabulary packed into one all-reduce. Its result feeds the same arithmetic on all ranks, hence dst="I".
The scheme is that of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

# N tokens, V vocabulary, v = columns of this rank (V / tp, rounded up where padded), K packed sums
from __future__ import annotations

import torch
from torch import Tensor

from tpcompile.collectives.strategies import TpComm
from tpcompile.errors import ConfigError
from tpcompile.fastpath.plain import stat_dtype
from tpcompile.layout import Part
from tpcompile.nn.embedding import vocab_columns

_REDUCTIONS = ("mean", "sum", "none")


def vocab_parallel_cross_entropy(
    logits_Nv: Tensor,
    targets_N: Tensor,
    *,
    comm: TpComm,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """F.cross_entropy of the full logits [N, V], the same on all ranks: a scalar, or [N] for reduction="none".

    Logits are sharded over columns as `ParallelLMHead` makes them, targets are replicated. Statistics and result are
    float32, float64 for float64; torch returns the logits' dtype. Padding columns count as absent. A target that is
    neither `ignore_index` nor in the vocabulary makes the loss NaN, where torch raises: finding out would stop the
    device. With reduction="mean" and every target ignored the loss is NaN, as in torch.

    Raises ConfigError for wrong dims, dtypes or sizes, an unknown reduction, and smoothing outside [0, 1].
    """
    _check(logits_Nv, targets_N, comm, vocab_size)
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r} is unknown; choose from {', '.join(_REDUCTIONS)}")
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"label_smoothing={label_smoothing} is outside [0, 1]")
    sums_NK = comm.all_reduce(  # partial -> replicated, replicated gradient
        _local_sums(logits_Nv, targets_N, comm, vocab_size, smoothed=label_smoothing > 0), dst="I"
    )
    log_norm_N = sums_NK[:, 0].log()
    loss_N = log_norm_N - sums_NK[:, 1]
    if label_smoothing > 0:
        uniform_N = log_norm_N - sums_NK[:, 2] / vocab_size
        loss_N = (1 - label_smoothing) * loss_N + label_smoothing * uniform_N
    return _reduce(loss_N, targets_N, vocab_size, ignore_index, reduction)


def _local_sums(logits_Nv: Tensor, targets_N: Tensor, comm: TpComm, vocab_size: int, *, smoothed: bool) -> Tensor:
    """This rank's part of [N, K]: sum of exp, logit of the target, and with smoothing sum of logits, all minus the max.

    The target's column is found by comparison: unlike a gather its gradient is no scatter, so that Inductor makes one
    pass over the logits in each direction.
    """
    num_columns = logits_Nv.shape[1]
    columns_v = vocab_columns(num_columns, comm=comm, device=logits_Nv.device)
    padding_v = columns_v >= vocab_size if num_columns * comm.size != vocab_size else None
    if padding_v is not None:
        logits_Nv = logits_Nv.masked_fill(padding_v, float("-inf"))
    # A shift of all logits changes no loss, so the maximum needs no gradient. It is exact in the logits' dtype.
    top_N1 = comm.all_max(logits_Nv.detach().amax(-1, keepdim=True))
    shifted_Nv = logits_Nv.to(stat_dtype(logits_Nv.dtype)) - top_N1
    is_target_Nv = columns_v == targets_N.unsqueeze(1)
    sums = [shifted_Nv.exp().sum(-1), torch.where(is_target_Nv, shifted_Nv, 0.0).sum(-1)]
    if smoothed:
        real_Nv = shifted_Nv if padding_v is None else shifted_Nv.masked_fill(padding_v, 0.0)
        sums.append(real_Nv.sum(-1))
    return torch.stack(sums, -1)


def _reduce(loss_N: Tensor, targets_N: Tensor, vocab_size: int, ignore_index: int, reduction: str) -> Tensor:
    counted_N = targets_N != ignore_index
    unknown_N = counted_N & ((targets_N < 0) | (targets_N >= vocab_size))
    loss_N = loss_N.masked_fill(~counted_N, 0.0).masked_fill(unknown_N, float("nan"))
    if reduction == "none":
        return loss_N
    return loss_N.sum() if reduction == "sum" else loss_N.sum() / counted_N.sum()


def _check(logits_Nv: Tensor, targets_N: Tensor, comm: TpComm, vocab_size: int) -> None:
    shapes = f"logits {tuple(logits_Nv.shape)}, targets {tuple(targets_N.shape)}"
    if logits_Nv.dim() != 2 or targets_N.dim() != 1 or logits_Nv.shape[0] != targets_N.shape[0]:
        raise ConfigError(f"{shapes}: pass logits [N, V / tp] and targets [N]; flatten batch and sequence first")
    if targets_N.dtype != torch.int64 or not logits_Nv.is_floating_point():
        raise ConfigError(f"logits are {logits_Nv.dtype}, targets {targets_N.dtype}; pass floats and int64")
    expected = Part(vocab_size, padded=True).share(comm.size)
    if logits_Nv.shape[1] != expected:
        raise ConfigError(
            f"logits have {logits_Nv.shape[1]} columns on this rank, but vocab_size={vocab_size} over tp={comm.size} "
            f"makes {expected}; pass this rank's columns of the padded vocabulary, and the vocabulary without padding"
        )
