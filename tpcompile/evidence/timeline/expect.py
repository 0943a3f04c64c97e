"""Events so far -> what comes next if the program goes on as before: replay, no model of loops or branches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def replayed(past: Sequence[Hashable], length: int) -> list[int]:
    """Indices into `past` of the events that come next: those after the longest context that occurred before.

    The context is what precedes the end of `past`; of several equally long ones the newest counts. Where the replay
    reaches the end it goes on with what it has replayed, as a loop would. Empty where the last event is new: nothing is
    known then about what follows it.
    """
    contexts = contexts_before(past)
    longest = max(contexts, default=0)
    if longest == 0:
        return []
    start = len(contexts) - contexts[::-1].index(longest) - 1
    period = len(past) - start
    return [start + step % period for step in range(length)]


def due_after(past: Sequence[Hashable]) -> set[Hashable]:
    """The events that came next after the longest context that occurred before; several where it led to several."""
    contexts = contexts_before(past)
    longest = max(contexts, default=0)
    return {event for event, length in zip(past, contexts, strict=True) if length and length == longest}


def contexts_before(past: Sequence[Hashable]) -> list[int]:
    """For each index of `past`, how many of the events before it are equal to those before the end of `past`."""
    backwards = list(reversed(past))
    common = _common_with_start(backwards)
    # the context of index i ends with event i - 1, which is at len - i when read backwards
    return [0, *(common[len(past) - index] for index in range(1, len(past)))][: len(past)]


def _common_with_start(values: Sequence[Hashable]) -> list[int]:
    """For each index, the length of the run from there on that is equal to the start of `values` (Z function).

    Linear: a ring holds thousands of events, and a loop makes most of them equal to the start.
    """
    lengths = [len(values)] * len(values)
    left = right = 0
    for index in range(1, len(values)):
        known = min(lengths[index - left], right - index) if index < right else 0
        while index + known < len(values) and values[known] == values[index + known]:
            known += 1
        lengths[index] = known
        if index + known > right:
            left, right = index, index + known
    return lengths


def num_equal(values: Sequence[Hashable], others: Sequence[Hashable]) -> int:
    """Length of the common start of two sequences."""
    for index, (value, other) in enumerate(zip(values, others, strict=False)):
        if value != other:
            return index
    return min(len(values), len(others))
