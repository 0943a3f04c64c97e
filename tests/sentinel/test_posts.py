"""What ranks post about a compile, and what a rank that compiled alone publishes: its first collective and line."""

from __future__ import annotations

import pytest

from tests.evidence.samples import call, compiled, graph, guard, line
from tests.sentinel.test_hang import state
from tpcompile.evidence.records import CompileRecord, UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel.checks import one_rank_check
from tpcompile.sentinel.messages import Position, post_of

WEIGHT = "L['self']._parameters['weight']"
IN_PACKAGE = UserLine(file="/venv/lib/python3.11/site-packages/transformers/modeling.py", line=377, function="forward")
IN_PROGRAM = UserLine(file="/home/me/train.py", line=44, function="forward")
AT = Position(region="f", call=4, index=0)


def num_collectives(compile_: CompileRecord, *, is_uneven: bool = False) -> int:
    return post_of(0, compile_, is_uneven=is_uneven).num_collectives


def test_a_dtensor_communicates_unseen_where_nothing_was_lowered() -> None:
    local = (guard("TENSOR_MATCH", f"{WEIGHT}._local_tensor"),)
    assert num_collectives(compiled(guards=local, collectives=())) == 1
    lowered = (graph(call("relu")), graph(call("relu"), kind="forward"))
    assert num_collectives(compiled(graphs=lowered, guards=local, collectives=())) == 0
    assert num_collectives(compiled(guards=(guard("TENSOR_MATCH", WEIGHT),), collectives=())) == 0


def test_an_uneven_region_or_an_argument_that_is_a_dtensor_holds_no_rank() -> None:
    local = (guard("TENSOR_MATCH", f"{WEIGHT}._local_tensor"),)
    assert num_collectives(compiled(guards=local, collectives=()), is_uneven=True) == 0
    logged = (guard("TENSOR_MATCH", "L['loss']._local_tensor"),)
    assert num_collectives(compiled(guards=logged, collectives=())) == 0


def alone(reason: str) -> tuple[Cause, UserLine | None]:
    """Cause and line of a compile of one rank, in a model that an installed package wrote."""
    compile_ = compiled(line=IN_PACKAGE, stack=(IN_PROGRAM, IN_PACKAGE), recompile_reasons=(reason,))
    found = one_rank_check(1, AT, state(0), compile_)
    return found.cause, found.line


@pytest.mark.parametrize(
    ("reason", "cause", "at"),
    [
        ("tensor 'x' size mismatch at index 0. expected 4, actual 7", Cause.SHAPE, IN_PROGRAM),
        ("self.training == True", Cause.PYTHON_VALUE, IN_PACKAGE),
    ],
)
def test_what_is_fed_from_outside_stands_where_the_program_calls_the_package(
    reason: str, cause: Cause, at: UserLine
) -> None:
    assert alone(f"0/0: {reason}") == (cause, at)


def test_a_rank_in_an_installed_package_has_a_line_of_the_program() -> None:
    assert state(0, stack=(IN_PROGRAM, IN_PACKAGE)).program_line == IN_PROGRAM
    assert state(0, stack=(IN_PACKAGE,)).program_line == IN_PACKAGE
    assert state(0, stack=(line(3),)).program_line == line(3)
