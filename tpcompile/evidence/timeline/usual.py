"""Ways that ranks went -> which of them is the common program, and why it is that one: pure.

This is the one place that decides who left the program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

from tpcompile.evidence import iterables
from tpcompile.evidence.iterables import differ, first
from tpcompile.evidence.timeline.expect import due_after, num_equal
from tpcompile.evidence.timeline.parting import Why
from tpcompile.evidence.timeline.source_order import depth_of_loop, function_of
from tpcompile.evidence.timeline.stream import Event, How
from tpcompile.evidence.timeline.tracks import Step
from tpcompile.evidence.timeline.ways import Way, common_past

_SEVERAL = 3
"""Ranks that have the same sizes: two may by chance."""


def usual_way(ways: Sequence[Way]) -> tuple[Way | None, Why]:
    """The way of the ranks that stayed in the common program; None where nothing tells which it is."""
    is_same_event = not differ(way.first.program for way in ways)
    is_open = is_same_event and any(way.first.event.is_unlike for way in ways)
    most = None if is_open and not _has_common_sizes(ways) else majority(ways)
    if most is not None and is_open and most.first.event.is_unlike:
        most = None  # of ranks whose content nobody knows, it need not be the same
    if most is not None or is_open:
        return most, Why.MAJORITY if most else Why.NONE
    expected = _as_before(ways, _key if is_same_event else _program)
    if expected is not None and not _may_be_over(expected, ways):
        return expected, Why.OWN_PAST
    # a rank that left a loop may have met others in what followed it, before it ended
    going_on = [way for way in ways if way.stream.end is None]
    return (going_on[0], Why.END) if len(going_on) == 1 else (None, Why.NONE)


def _has_common_sizes(ways: Sequence[Way]) -> bool:
    """False where each rank has sizes of its own: that most ranks fit says nothing about the one that does not.

    Several that have the same, as in an `all_gather` into a list, do not have it by chance.
    """
    own = [own for way in ways if not way.first.event.is_unlike for own in way.own]
    return not any(own) or (len(own) >= _SEVERAL and not differ(tuple(one.items()) for one in own))


def majority(ways: Sequence[Way]) -> Way | None:
    """The way of more than half of the ranks that have come there."""
    most = iterables.majority(way.ranks for way in ways)
    return first(way for way in ways if way.ranks is most)


def _as_before(ways: Sequence[Way], what: Callable[[Step], Hashable]) -> Way | None:
    """The one way that goes on as the past did, or else the only one that ranks ever went before."""
    past = list(map(what, common_past(ways)))
    due = [way for way in ways if what(way.first) in due_after(past)]
    if due:
        return due[0] if len(due) == 1 else None
    known = [way for way in ways if what(way.first) in past]
    return known[0] if len(known) == 1 else None


def _program(step: Step) -> Hashable:
    return step.program


def _key(step: Step) -> Hashable:
    return step.key


def _may_be_over(usual: Way, ways: Sequence[Way]) -> bool:
    """True where some ranks go round a loop, and what the others do is new and outside of the loop.

    The past of a loop says nothing about how often it goes round before it ends for the first time.
    """
    past = common_past(ways)
    again, before = usual.first, past[-1].event
    depth = depth_of_loop(again.event, before)
    if depth is None:
        return False
    loops = again.event.loops[: depth + 1]
    if loops:
        inside = [number for number, (first, _) in enumerate(loops) if first]
        if not inside:
            return False
        depth = inside[-1]
        lines = range(loops[depth][0], loops[depth][1] + 1)
    else:
        ends = [step.event for step, following in pairwise(past) if following.program == again.program]
        last = max(event.stack[depth].line for event in (*ends, before) if len(event.stack) > depth)
        # an outer loop that goes round again begins with what was done before, if all that was done is known
        lines = range(0 if usual.knows_start else again.event.stack[depth].line, last + 1)
    seen = {step.program for step in past}
    others = [way.first for way in ways if way is not usual]
    return all(step.program not in seen and _is_outside(step.event, again.event, depth, lines) for step in others)


def _is_outside(event: Event, first: Event, depth: int, lines: range) -> bool:
    """True for an event that is not on the lines of a loop; a rank that finished has left the loop."""
    if not event.stack:
        return event.name == How.FINISHED
    if num_equal(event.place, first.place) < depth or len(event.stack) <= depth:
        return True
    mine, loop = event.stack[depth], first.stack[depth]
    return function_of(mine) != function_of(loop) or mine.line not in lines
