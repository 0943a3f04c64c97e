"""Ranks -> the short text people read: `0-2,5`."""

from collections.abc import Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """`(0, 1, 2, 5)` -> `0-2,5`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
