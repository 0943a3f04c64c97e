"""What is wrong with ranks that do not go on, as every part of the sentinel that looks for it says it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """What is wrong, in the terms of a check."""

    cause: Cause
    observed: str
    ranks: tuple[int, ...]
    """Ranks to blame."""
    line: UserLine | None = None
    details: tuple[str, ...] = ()
    gone: tuple[int, ...] = ()
    """Ranks that cannot take part any more."""
    is_by_number: bool = False
    """Numbers of collectives differ; which collective it is, the ranks' own records say."""

    @property
    def is_loss(self) -> bool:
        """A process is gone or does not answer."""
        return self.cause in (Cause.KILLED, Cause.STOPPED_RESPONDING)


def call_or_collective(is_call: object) -> Cause:
    """Of ranks that are not in step: a call of compiled code is what one made more or less, or a collective."""
    return Cause.CALL_COUNT if is_call else Cause.STUCK_COLLECTIVE


def fewer_of(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Of two sides that differ, the ranks of the smaller one; all of both where they are equal."""
    fewer, more = sorted([one, other], key=len)
    return fewer if len(fewer) < len(more) else tuple(sorted(fewer + more))


def first_finding(find: Callable[[T], Finding | None], among: Iterable[T]) -> Finding | None:
    """What is found in the first of several things in which anything is found."""
    return first(filter(None, map(find, among)))
