"""What is wrong with ranks that cannot continue: the result of every rule of the sentinel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from tpcompile.evidence.iterables import first, majority
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """A problem, with the fields of a check."""

    cause: Cause
    observed: str
    ranks: tuple[int, ...]
    """Ranks to blame."""
    line: UserLine | None = None
    details: tuple[str, ...] = ()
    gone: tuple[int, ...] = ()
    """Ranks whose process has ended or does not answer."""
    is_rank_known: bool = True
    """False where nothing tells which of `ranks` left the common program."""
    is_by_past: bool = False
    """These ranks are blamed as they did otherwise than before, or ended first: no majority says so."""
    left_out: UserLine | None = None
    """The innermost line of what these ranks left out."""
    at_call: int = 0
    """Of a line that the ranks call in step, the call at which it was seen; 0 where that is not known."""
    is_by_number: bool = False
    """Only the number of collectives is known to differ; which collective, the ranks' flight recorders show."""
    is_of_agreement: bool = False
    """A value that the program says is equal, or the calls that say so, differ; no rank need wait."""

    @property
    def is_loss(self) -> bool:
        """True for a process that has ended or does not answer."""
        return self.cause in (Cause.KILLED, Cause.STOPPED_RESPONDING)


def fewer_of(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks of the smaller of two groups; of both groups if their sizes are equal."""
    more = majority([one, other])
    return tuple(sorted(one + other)) if more is None else other if more is one else one


def first_finding(find: Callable[[T], Finding | None], among: Iterable[T]) -> Finding | None:
    """The first finding that `find` returns for the elements of `among`."""
    return first(filter(None, map(find, among)))
