"""Ranks -> the short text people read: `0-2,5`."""

import re
from collections.abc import Sequence

from tpcompile.evidence.iterables import grouped

_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def ranks_text(ranks: Sequence[int]) -> str:
    """`(0, 1, 2, 5)` -> `0-2,5`."""
    # Ranks in a row are all as far from their place in the list.
    runs = grouped(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]).values()
    ends = [dict.fromkeys([run[0][1], run[-1][1]]) for run in runs]
    return ",".join("-".join(map(str, pair)) for pair in ends)


def is_among(rank: int, text: str) -> bool:
    """True for a rank that a text of ranks has: 1 is among `0-2,5`."""
    return any(int(first) <= rank <= int(last or first) for first, last in _RUN.findall(text))


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 7` or `ranks 0-6`."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {ranks_text(ranks)}"


def num_ranks(number: int) -> str:
    """`1 rank` or `2 ranks`."""
    return f"{number} rank" if number == 1 else f"{number} ranks"
