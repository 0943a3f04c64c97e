"""Steps behind which a function was left without a return -> whose line decided that: of a `yield`, of an exception."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tpcompile.evidence.iterables import first
from tpcompile.evidence.timeline import source
from tpcompile.evidence.timeline.walk import Fork, Step, Walks, is_line, place_of


def by_taker(fork: Fork, walks: Walks, readable: Collection[str]) -> Fork:
    """The fork, of ranks that part where a generator has yielded at the line that took the value."""
    code, line = fork.branch
    if len(fork.frames) < 2 or not source.is_yield(walks.codes[code].file, line, readable):
        return fork
    return by_taker(replace(fork, frames=fork.frames[:-1]), walks, readable)


def is_not_caught(walks: Walks, rank: int, at: int, readable: Collection[str]) -> bool:
    """True where the rank comes next to an `except` that does not catch what was raised: it leaves the function."""
    steps = walks.steps[rank][at:]
    if not steps or not is_line(steps[0]):
        return False
    code, _ = place_of(steps[0])
    file = walks.codes[code].file

    def is_handler(step: Step) -> bool:
        return is_line(step) and place_of(step)[0] == code and source.is_handler(file, place_of(step)[1], readable)

    following = first(step for step in steps if not is_handler(step))
    goes_on = following is not None and is_line(following) and place_of(following)[0] == code
    return is_handler(steps[0]) and not goes_on
