"""The profiles of the callables of this process -> entries of its environment, which ranks compare."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_MAX_KEPT = 64
"""A process may make callables without end; ranks then compare the last ones."""


@dataclass
class Choice:
    """What a callable runs under."""

    label: str
    profile: str
    all_reduce: str = "nccl"
    """How its graphs sum over ranks."""
    is_open: bool = True


_MADE: deque[Choice] = deque(maxlen=_MAX_KEPT)
"""Choices of this process, the newest last."""


def add(label: str, profile: str, *, all_reduce: str = "nccl") -> Choice:
    """Record a callable that was made; the caller updates the choice that is returned."""
    choice = Choice(label, profile, all_reduce)
    _MADE.append(choice)
    return choice


def closed() -> list[Choice]:
    """Choices of callables that are no longer in use."""
    return [choice for choice in _MADE if not choice.is_open]


def entries(*, without: list[Choice]) -> dict[str, str]:
    """`profile of LABEL` -> its profile, and `all_reduce of LABEL` where that is not NCCL's.

    Several callables with one label have one entry, in the order in which they were made.
    """
    ended = {id(choice) for choice in without}
    found: dict[str, list[str]] = {}
    for choice in list(_MADE):
        if id(choice) in ended:
            continue
        found.setdefault(f"profile of {choice.label}", []).append(choice.profile)
        if choice.all_reduce != "nccl":
            found.setdefault(f"all_reduce of {choice.label}", []).append(choice.all_reduce)
    return {name: ", ".join(values) for name, values in found.items()}
