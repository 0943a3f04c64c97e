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
    is_open: bool = True


_MADE: deque[Choice] = deque(maxlen=_MAX_KEPT)
"""Of this process, the newest last."""


def add(label: str, profile: str) -> Choice:
    """A callable that was made."""
    choice = Choice(label, profile)
    _MADE.append(choice)
    return choice


def closed() -> list[Choice]:
    """Those that are no longer in use."""
    return [choice for choice in _MADE if not choice.is_open]


def entries(*, without: list[Choice]) -> dict[str, str]:
    """`profile of LABEL` -> its profile; of several callables with one label, the profiles in the order they came."""
    ended = {id(choice) for choice in without}
    found: dict[str, list[str]] = {}
    for choice in list(_MADE):
        if id(choice) not in ended:
            found.setdefault(f"profile of {choice.label}", []).append(choice.profile)
    return {name: ", ".join(profiles) for name, profiles in found.items()}
