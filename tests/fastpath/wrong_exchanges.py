"""`python -m tests.fastpath.wrong_exchanges [STEP]`: named faults in kernels that exchange, each with its case."""

from __future__ import annotations

import sys

from tests.fastpath.wrong_kernels import (
    FIRST,
    GROUPED,
    NEIGHBOUR,
    ONE_REPLICA,
    SECOND,
    STRIDED,
    Fault,
    next_slice,
    report,
)

QK, NORM = "qk_norm_rope_exchange", "all_reduce_add_rms_norm"
DENSE, WORDS = "2 x 5 tokens, 2 programs", "2 x 5 tokens, 16 programs"
"""Rows go out as values and a flag, or as words."""
FEW = "grouped"
"""A row for each program; of more rows a program has several."""
SUMMED = "q_sum, k_sum = sum_of_pairs("
SLOT, SOURCE = "& 1).to", "NUM_RANKS + source)"
OWN = "more_first, more_second = unpack(own, DTYPE)"
ADDED = "rounded = pack(first + x_first, second + x_second, DTYPE)"


def of_both(name: str, function: str, before: str, after: str, *, tp: int = 2) -> list[Fault]:
    """A fault in the protocol, in each kernel and form."""
    cases = ((QK, FIRST), (NORM, WORDS), (NORM, DENSE))
    return [Fault(name, path, case, function, before, after, tp=tp) for path, case in cases]


FAULTS = [
    *of_both("slot outside of the memory", "row_of", SLOT, "& 3).to"),
    *of_both("place of the owner instead of the sender", "row_of", SOURCE, "NUM_RANKS + owner)", tp=4),
    *of_both("tag off by one", "is_late", "!= (tag >> 32)", "!= ((tag >> 32) + 1)"),
    *of_both("epoch not counted", "end", "(tag >> 32).to", "((tag >> 32) - 1).to"),
    Fault(
        "own value not published",
        QK,
        FIRST,
        "publish_pair",
        "mask = at < 2 * NUM_RANKS",
        "mask = (at < 2 * NUM_RANKS) & (at // 2 != tl.load(state))",
    ),
    Fault("sums of q and k exchanged", QK, FIRST, "qk_exchange_many_kernel", "tag, q_sum, k_sum", "tag, k_sum, q_sum"),
    Fault("words of one rank for all", QK, FIRST, "sum_of_pairs", "at // 2, 0), row", "0, 0), row"),
    Fault("maximum in place of a sum", QK, FIRST, "sum_of_pairs", "first = tl.sum(", "first = tl.max("),
    Fault("statistics over the shard", QK, FIRST, "qk_exchange_many_kernel", SUMMED, "sum_of_pairs("),
    Fault("statistics over the shard", QK, FEW, "qk_exchange_kernel", SUMMED, "sum_of_pairs("),
    Fault("eps outside of the root", QK, FIRST, "qk_exchange_many_kernel", "q_count + eps)", "q_count) + eps"),
    Fault("eps outside of the root", QK, FEW, "qk_exchange_kernel", "q_count + eps)", "q_count) + eps"),
    Fault("weight of the next rank", QK, FIRST, argument=next_slice("q_weight_d")),
    Fault("a replica of k counted twice", QK, GROUPED, argument=ONE_REPLICA, tp=4),
    Fault("pairs of neighbours", QK, FIRST, "load_heads", SECOND, NEIGHBOUR),
    Fault("wrong stride", QK, STRIDED, "qk_exchange", "*q_BSd.stride()[:2]", "*q_BSd.contiguous().stride()[:2]"),
    Fault(
        "own value missing",
        NORM,
        WORDS,
        "sum_of_rows",
        OWN,
        "more_first, more_second = unpack(tl.zeros_like(own), DTYPE)",
    ),
    Fault(
        "own value for those of the peers",
        NORM,
        WORDS,
        "sum_of_rows",
        "more_first, more_second = unpack(values, DTYPE)",
        "more_first += 0.0",
    ),
    Fault(
        "average in place of a sum",
        NORM,
        DENSE,
        "sum_of_rows",
        "first += more_first",
        "first += more_first / NUM_RANKS",
    ),
    Fault(
        "residual on every rank",
        NORM,
        DENSE,
        "all_reduce_norm_row",
        ADDED,
        "rounded = pack(first + NUM_RANKS * x_first, second + NUM_RANKS * x_second, DTYPE)",
    ),
    Fault("residual dropped", NORM, DENSE, "all_reduce_norm_row", ADDED, "rounded = pack(first, second, DTYPE)"),
    Fault(
        "norm without the residual",
        NORM,
        DENSE,
        "all_reduce_norm_row",
        "first, second = unpack(rounded, DTYPE)",
        "first = first * 1.0",
    ),
    Fault(
        "eps outside of the root",
        NORM,
        DENSE,
        "all_reduce_norm_row",
        "squares / width + eps)",
        "squares / width) + eps",
    ),
    Fault("mask off by one", NORM, DENSE, "all_reduce_norm_row", "at < num_values", "at <= num_values"),
    Fault(
        "missing tail", NORM, DENSE, "all_reduce_norm", "max(block_of(num_values), ", "max(block_of(num_values) // 2, "
    ),
    Fault("wrong stride", NORM, DENSE, "_dense", "x_D.contiguous()", "x_D"),
]

if __name__ == "__main__":
    report(FAULTS[:: int(sys.argv[1])], cpu_s=40.0)
