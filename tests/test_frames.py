"""At some depths each call maps memory for its frame; with room there is no such depth."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tpcompile.frames import with_room

DEPTHS, CALLS = 300, 200


def most_faults(start: Callable[[int], None]) -> int:
    """Page faults of `CALLS` calls, at the depth with the most; in a thread, whose frames have no room from outside."""

    def count() -> int:
        found = []
        for depth in range(DEPTHS):
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            start(depth)
            found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
        return max(found)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(count).result()


def calls_at(depth: int) -> None:
    if depth:
        return calls_at(depth - 1)
    for _ in range(CALLS):
        nothing()


def nothing() -> None:
    pass


@with_room
def calls_with_room(depth: int) -> None:
    calls_at(depth)


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="page faults of a thread are counted on Linux")
def test_no_depth_maps_memory_in_every_call() -> None:
    assert most_faults(calls_with_room) < CALLS / 2
    if sys.version_info < (3, 15):
        assert most_faults(calls_at) >= CALLS


def test_a_function_with_room_does_what_it_did() -> None:
    @with_room
    def add(first: int, /, *, second: int = 2) -> int:
        """The sum."""
        return first + second

    assert (add(1), add(1, second=3), add.__name__, add.__doc__) == (3, 4, "add", "The sum.")
