"""Collectives with a stated gradient, equal in eager and compiled: the functional wrappers a model calls."""

from tpcompile.collectives.api import (
    Dst,
    all_gather_single,
    all_reduce,
    all_to_all_single,
    broadcast,
    copy_to_tp,
    reduce_scatter_single,
    scatter_single,
)
from tpcompile.collectives.asynchronous import (
    all_gather_start,
    all_reduce_start,
    all_to_all_start,
    reduce_scatter_start,
)
from tpcompile.ranks.groups import GroupLike, rank_index

__all__ = [
    "Dst",
    "GroupLike",
    "all_gather_single",
    "all_gather_start",
    "all_reduce",
    "all_reduce_start",
    "all_to_all_single",
    "all_to_all_start",
    "broadcast",
    "copy_to_tp",
    "rank_index",
    "reduce_scatter_single",
    "reduce_scatter_start",
    "scatter_single",
]
