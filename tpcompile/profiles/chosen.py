"""The profiles of the callables of this process -> entries of its environment, which ranks compare."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_MAX_KEPT = 64


@dataclass
class Choice:
    """What a callable runs under."""

    label: str
    profile: str
    all_reduce: str = "nccl"
    """How its graphs sum over ranks."""
    is_open: bool = True


_MADE: deque[Choice] = deque(maxlen=_MAX_KEPT)
"""Of this process, the newest last."""


def add(label: str, profile: str, *, all_reduce: str = "nccl") -> Choice:
    """A callable that was made."""
    choice = Choice(label, profile, all_reduce)
    _MADE.append(choice)
    return choice


def closed() -> list[Choice]:
    """Those that are no longer in use."""
    return [choice for choice in _MADE if not choice.is_open]


def entries(*, without: list[Choice]) -> dict[str, str]:
    """`profile of LABEL` -> its profile, and `all_reduce of LABEL` where that is not NCCL's.

    Of several callables with one label, in the order they came.
    """
    ended = {id(choice) for choice in without}
    open_ones = [choice for choice in list(_MADE) if id(choice) not in ended]
    by_size = [choice for choice in open_ones if choice.all_reduce != "nccl"]
    profiles = [(f"profile of {choice.label}", choice.profile) for choice in open_ones]
    sums = [(f"all_reduce of {choice.label}", choice.all_reduce) for choice in by_size]
    found: dict[str, list[str]] = {}
    for name, value in [*profiles, *sums]:
        found.setdefault(name, []).append(value)
    return {name: ", ".join(values) for name, values in found.items()}
