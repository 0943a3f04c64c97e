"""This process -> the numbers that tell its rank from others, and that each rank writes into texts of its own."""

from __future__ import annotations

import os
from functools import cache

import torch.distributed as dist

_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK")
"""torchrun's: of the job, of the machine, and of the machine itself."""


def own_numbers() -> frozenset[int]:
    """Its rank, its place on its machine, and the number of this: `rank_3.log`, `cuda:1`, `logs/node0`."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else None
    return _numbers(rank, tuple(os.environ.get(name, "") for name in _VARIABLES))


@cache
def _numbers(rank: int | None, texts: tuple[str, ...]) -> frozenset[int]:
    known = [int(text) for text in texts if text.isdecimal() and text.isascii()]
    return frozenset(known if rank is None else [rank, *known])
