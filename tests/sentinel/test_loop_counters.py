"""Which variables are loops of the user's program, and what they show."""

from __future__ import annotations

import sys
import weakref

from tpcompile.sentinel.loop_counters import counters, loop_variables


def program(batches: list[tuple[int, str]]) -> dict[str, int]:
    total = 0
    for step, (size, _name) in enumerate(batches):
        total += size * step
        for micro in range(2):
            found = here()
            assert micro < 2
    assert total
    return found


def here() -> dict[str, int]:
    return counters(sys._getframe(), ())


def test_targets_of_for_loops_are_counters_and_other_numbers_are_not() -> None:
    assert loop_variables(program.__code__) == ("step", "size", "_name", "micro")


def test_a_call_sees_the_loops_of_all_functions_around_it() -> None:
    for epoch in range(3):
        found = program([(4 + epoch, "a"), (6, "b")])
    assert found["`step` in program"] == 1 and found["`micro` in program"] == 1
    name = test_a_call_sees_the_loops_of_all_functions_around_it.__name__
    assert found[f"`epoch` in {name}"] == 2
    assert "`_name` in program" not in found, "it holds no number"


class Batch:
    """Something large."""


def test_reading_the_counters_keeps_nothing_alive_and_leaves_the_programs_own_copy_alone() -> None:
    seen = []
    for number in range(3):
        batch = Batch()
        found, alive = here(), weakref.ref(batch)
        del batch
        seen.append((number in found.values(), alive() is None))
    assert seen == [(True, True)] * 3
    mine = locals()
    here()
    assert "seen" in mine


def test_loops_of_a_comprehension_are_seen() -> None:
    found = [here() for batch in range(3)]
    assert [next(value for name, value in one.items() if "batch" in name) for one in found] == [0, 1, 2]
