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

    def add_to(self, found: dict[str, list[str]]) -> None:
        """Its entries, behind those of callables with the same label."""
        found.setdefault(f"profile of {self.label}", []).append(self.profile)
        if self.all_reduce != "nccl":
            found.setdefault(f"all_reduce of {self.label}", []).append(self.all_reduce)


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
    found: dict[str, list[str]] = {}
    for choice in list(_MADE):
        if id(choice) not in ended:
            choice.add_to(found)
    return {name: ", ".join(values) for name, values in found.items()}
