"""What the loss of a vocabulary-sharded model communicates, in the records that modules declare."""

from __future__ import annotations

import torch

from tpcompile.fastpath.plain import stat_dtype
from tpcompile.nn.sharding import Declared, declared_sum, reduced


def declared_cross_entropy(num_tokens: int, dtype: torch.dtype, *, label_smoothing: float = 0.0) -> Declared:
    """Collectives of `vocab_parallel_cross_entropy` for logits of `dtype`; none in the backward pass."""
    maximum = declared_sum("forward", (num_tokens, 1), dtype).model_copy(update={"reduce_op": "max"})
    sums = reduced((num_tokens, 3 if label_smoothing > 0 else 2), stat_dtype(dtype))
    return Declared((maximum,)).then(sums)
