"""What one rank compiles beside the program, in the steady calls: accepted the first time, and never as a recompile."""

from __future__ import annotations

from tests.evidence.samples import compiled, counters, line
from tests.gate.test_checks import CONFIG, failed, healthy, judge, phases
from tpcompile.evidence.records import CheckId, CompileRecord, RankRecord, Status

STEADY = CheckId.STEADY
LENGTH = CheckId.RESIZED
NAME = "forward app/metric.py:9"


def metric(phase: str = "C/steady", **fields: object) -> CompileRecord:
    """A function without collectives, such as an evaluation on rank 0."""
    alone = {"compile_id": "1/0", "line": line(9, "/app/metric.py"), "collectives": ()} | fields
    return compiled(phase=phase, **alone)


def evaluating(*compiles: CompileRecord) -> RankRecord:
    """Rank 0, which makes these compiles in the steady calls, beside the program."""
    number = len(compiles)
    steady = counters("C/steady", calls=CONFIG.gate.steady_calls, frames=number, graphs=number)
    return healthy(0, compiles=[*healthy(0).compiles, *compiles], counters=phases(C_steady=steady))


def test_the_first_compile_of_an_evaluation_on_one_rank_is_no_recompile() -> None:
    found = judge("C", evaluating(metric()), healthy(1))
    assert {check.status for check in found.values()} == {Status.PASS}
    says = f"0 compiles in {CONFIG.gate.steady_calls} calls; rank 0 compiled {NAME} for the first time"
    assert found[STEADY].observed == says


def test_a_recompile_of_that_evaluation_is_one() -> None:
    again = metric(compile_id="1/1", recompile_reasons=("1/0: k == 2",))
    assert failed("C", evaluating(metric(), again), healthy(1)) == {STEADY: (0,)}


def test_a_first_compile_with_collectives_on_one_rank_is_red() -> None:
    with_collectives = metric(collectives=compiled().collectives)
    assert failed("C", evaluating(with_collectives), healthy(1))[STEADY] == (0,)


def test_a_compile_that_left_no_record_is_not_taken_for_the_accepted_one() -> None:
    steady = counters("C/steady", calls=CONFIG.gate.steady_calls, frames=2, graphs=2)
    rank = evaluating(metric()).model_copy(update={"counters": phases(C_steady=steady)})
    assert failed("C", rank, healthy(1)) == {STEADY: (0,)}


def test_it_is_no_compile_for_the_changed_length_either() -> None:
    resized = counters("C/resized", frames=2, graphs=2, recompiles=1)
    rank = evaluating().model_copy(update={"counters": phases(C_resized=resized)})
    assert failed("C", rank, healthy(1))[LENGTH] == (0,)
    rank = rank.model_copy(update={"compiles": (*rank.compiles, metric("C/resized"))})
    assert failed("C", rank, healthy(1)) == {}
