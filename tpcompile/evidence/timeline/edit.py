"""The common program and an odd way -> what the odd ranks did with the program: pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tpcompile.evidence.timeline.expect import num_equal, replayed
from tpcompile.evidence.timeline.parting import Edit
from tpcompile.evidence.timeline.source_order import depth_of_loop, is_below
from tpcompile.evidence.timeline.stream import Event, Kind
from tpcompile.evidence.timeline.tracks import Step
from tpcompile.evidence.timeline.ways import Way

AHEAD = 60
"""Events of the program that are searched for what an odd rank did; an iteration seldom has more."""
Programs = Sequence[Hashable]


def due_steps(past: Sequence[Step], usual: Way | None) -> list[Step]:
    """What comes next in the common program: what the usual ranks did is certain, what follows it is replayed."""
    certain = list(usual.going_on) if usual else []
    if usual and len(certain) < len(usual.steps):
        return certain  # they have ended
    so_far = [*past, *certain]
    return certain + [so_far[index] for index in replayed(_programs(so_far), AHEAD)]


def edit_of(odd: Way, due: Sequence[Step], past: Sequence[Step]) -> Edit:
    """What the ranks did: the smallest change after which they go on as was due."""
    if odd.has_ended:
        return Edit.ENDED
    if not due:
        return Edit.ADDED  # the other ranks have ended
    if due[0].program == odd.first.program:
        return Edit.CONTENT
    changes = _changes(_programs(odd.going_on[:AHEAD]), _programs(due), past)
    return min(changes)[1] if changes else _by_source(odd.first, due[0].event, past)


def _changes(tail: Programs, program: Programs, past: Sequence[Step]) -> list[tuple[int, Edit]]:
    """The changes after which a rank did what was due, each with its size; none where it stopped in something else."""
    loops = {step.program for step in past if step.event.kind == Kind.ITERATION}
    found = []

    def consider(edit: Edit, changed: Programs, expected: Programs, follows: Programs) -> None:
        num_fitting = num_equal(expected, follows)
        num_unlike = min(len(expected), len(follows)) - num_fitting
        # the beginning of an iteration alone is neither left out nor added, what it contains is
        num_loops = len(loops.intersection(changed))
        if num_fitting:
            found.append((len(changed) + num_unlike + AHEAD * num_loops, edit))

    for num in range(1, len(program)):
        consider(Edit.LEFT_OUT, program[:num], program[num:], tail)
    for num in range(1, len(tail)):
        consider(Edit.ADDED, tail[:num], program, tail[num:])
    for again in _repeated(_programs(past)):
        consider(Edit.ADDED, again, [*again, *program], tail)
    return found


def _repeated(past: Programs) -> list[Programs]:
    """The parts that were done at least twice in a row, at the end: a loop may go round once more."""
    lengths = range(1, min(len(past) // 2, AHEAD) + 1)
    return [past[-length:] for length in lengths if past[-length:] == past[-2 * length : -length]]


def _by_source(odd: Step, due: Event, past: Sequence[Step]) -> Edit:
    """The edit by the order of lines: a rank that is below what was due went past it."""
    before = past[-1].event if past else due
    if depth_of_loop(due, before) is not None:
        is_known = odd.program in _programs(past)  # then it left a loop; else it may have done more in its last lines
        return Edit.LEFT_OUT if is_known else Edit.INSTEAD
    if depth_of_loop(odd.event, before) is not None:
        return Edit.ADDED
    return Edit.LEFT_OUT if is_below(odd.event, due) else Edit.INSTEAD


def _programs(steps: Sequence[Step]) -> list[Hashable]:
    return [step.program for step in steps]
