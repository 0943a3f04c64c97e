"""A compile that one rank alone made of a function that all ranks compile -> a call of its own, or a fault."""

from __future__ import annotations

from typing import Any

import pytest

from tests.evidence.samples import broken, call, collective, compiled, graph, guard, line, record
from tpcompile.evidence.comparison.compare import compare
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement.verdict import fetch_from
from tpcompile.evidence.records import CompileRecord, Divergence, DivergenceClass, RegionCount
from tpcompile.evidence.records.causes import Cause

TRAIN, EVALUATE = line(10, "/app/train.py"), line(40, "/app/train.py")
MAIN = line(90, "/app/train.py")
OTHER_SIZE = "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 7"


def trains(**fields: Any) -> CompileRecord:
    """The function, as all ranks call it; it issues no collective."""
    usual = {"collectives": (), "graphs": (graph(call("mul", "%0", "2")),), "called_from": (MAIN, TRAIN)}
    return compiled(**usual | fields)


def again(**fields: Any) -> CompileRecord:
    """The function under a different guard, called from the line of an evaluation."""
    usual = {"compile_id": "0/1", "recompile_reasons": (OTHER_SIZE,), "guards": (guard(says="== 7"),)}
    return trains(**usual | {"called_from": (MAIN, EVALUATE)} | fields)


def between(*ranks: list[CompileRecord], is_running: bool = False) -> list[Divergence]:
    """What differs, apart from the order of compiles."""
    records = [record(rank, *compiles, world_size=len(ranks)) for rank, compiles in enumerate(ranks)]
    digests = [digest_rank(one) for one in records]
    found = compare(digests, fetch_from(records), is_running=is_running)
    return [one for one in found if one.cause != Cause.COMPILE_ORDER]


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("reason", [OTHER_SIZE, "0/0: GLOBAL_STATE changed: grad_mode ", "0/0: self.training == True"])
def test_a_call_of_one_rank_from_a_line_of_its_own_is_listed(reason: str, is_running: bool) -> None:
    for ranks in ([[trains(), again(recompile_reasons=(reason,))], [trains()]], [[trains()], [trains(), again()]]):
        (found,) = between(*ranks, is_running=is_running)
        assert (found.cls, found.is_red) == (DivergenceClass.LABEL, False)
        assert str(EVALUATE) in found.title


@pytest.mark.parametrize(("num_calls", "is_red"), [((3, 2), False), ((3, 3), True), ((3, 4), True)])
def test_a_rank_that_calls_the_function_no_more_often_makes_no_call_of_its_own(
    num_calls: tuple[int, int], is_red: bool
) -> None:
    """The other rank calls it from that line as well, where what it has compiled fits."""
    records = []
    for rank, compiles in enumerate(([trains(), again()], [trains()])):
        made, hits = record(rank, *compiles, world_size=2), num_calls[rank] - len(compiles)
        target = line(3).model_copy(update={"function": "Block.forward"})
        count = RegionCount(
            phase=compiles[0].phase,
            target=target,
            calls=hits,
            entered=hits,
            most=1,
        )
        records.append(made.model_copy(update={"regions": (count,)}))
    found = compare([digest_rank(one) for one in records], fetch_from(records))
    assert [one.is_red for one in found if one.cause != Cause.COMPILE_ORDER] == [is_red]


@pytest.mark.parametrize(
    "fault",
    [
        {"called_from": (MAIN, TRAIN)},
        {"called_from": ()},
        {"collectives": (collective(),)},
        {"breaks": (broken(),)},
        {"failure": "no backward"},
        {"limit_reached": True},
        {"graphs": (graph(call("mul", "%0", "2", value="DTensor(f32[4, 8][8, 1]cpu)")),)},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_the_same_call_and_one_that_may_communicate_are_red(fault: dict[str, Any]) -> None:
    """Negative control: a rank that is fed differently where all call; collectives, seen or not; eager code."""
    found = between([trains(), again(**fault)], [trains()])
    assert [one.is_red for one in found] == [True]


def test_the_collectives_of_a_dtensor_are_known_once_it_is_lowered() -> None:
    dtensor = call("mul", "%0", "2", value="DTensor(f32[4, 8][8, 1]cpu)")
    evaluation = again(graphs=(graph(dtensor), graph(call("mul", "%0", "2"), kind="inference")))
    assert not any(one.is_red for one in between([trains(), evaluation], [trains()]))


def test_a_call_in_place_of_that_of_the_other_ranks_is_red() -> None:
    """`model(x.t()) if rank == 1 else model(x)`, on two lines; in mid-run the other call may be to come."""
    ranks = [[trains()], [again()]]
    assert [one.is_red for one in between(*ranks)] == [True]
    (found,) = between(*ranks, is_running=True)
    assert (found.cls, found.cause) == (DivergenceClass.LABEL, Cause.EXTRA_COMPILE)
    fed_later = [[trains()], [trains(called_from=(MAIN, EVALUATE)), again()]]
    assert [one.is_red for one in between(*fed_later)] == [True]
    same_call = [[trains()], [again(called_from=(MAIN, TRAIN))]]
    assert [one.is_red for one in between(*same_call, is_running=True)] == [True]


LEARNS = line(20, "/app/learner.py").model_copy(update={"function": "Learner.run"})
ACTS = line(30, "/app/actor.py").model_copy(update={"function": "Actor.run"})


def learner_and_actors(**fault: Any) -> list[list[CompileRecord]]:
    """Rank 0 compiles a function of its own, ranks 1 and 2 another one; `fault` is in what rank 0 compiles."""
    own = {"graphs": (graph(call("mul", "%0", "3")),), "called_from": (MAIN, LEARNS)}
    learns = trains(function="inner", line=LEARNS, **own | fault)
    acts = trains(function="inner", line=ACTS, called_from=(MAIN, ACTS))
    return [[learns], [acts], [acts]]


def test_ranks_with_roles_of_their_own_compile_functions_of_their_own() -> None:
    found = between(*learner_and_actors(), is_running=True)
    assert {(one.cls, one.cause) for one in found} == {(DivergenceClass.LABEL, Cause.EXTRA_COMPILE)}


@pytest.mark.parametrize(
    ("fault", "is_running"),
    [
        ({}, False),
        ({"called_from": (MAIN, ACTS)}, True),
        ({"called_from": ()}, True),
        ({"collectives": (collective(),)}, True),
        ({"breaks": (broken(),)}, True),
    ],
)
def test_a_function_in_place_of_that_of_the_other_ranks_is_red(fault: dict[str, Any], is_running: bool) -> None:
    """Negative control: a gate wants one program; one call chooses among functions; what ranks may wait in."""
    assert any(one.is_red for one in between(*learner_and_actors(**fault), is_running=is_running))


@pytest.mark.parametrize("is_running", [True, False])
def test_a_fault_beside_an_evaluation_is_named_for_itself(is_running: bool) -> None:
    fault = again(called_from=(MAIN, TRAIN), guards=(guard(says="== 9"),))
    found = between([trains(), again()], [trains(), fault], is_running=is_running)
    red = [one for one in found if one.is_red]
    assert [(one.cause, one.culprits) for one in red] == [(Cause.SHAPE, (1,))]
    assert [one.cls for one in found if not one.is_red] == [DivergenceClass.LABEL]


@pytest.mark.parametrize("is_running", [True, False])
def test_an_evaluation_before_the_first_step_is_no_counterpart_of_it(is_running: bool) -> None:
    sanity = again(compile_id="0/0", recompile_reasons=())
    later = trains(compile_id="0/1", recompile_reasons=("0/0: GLOBAL_STATE changed: grad_mode ",))
    assert not any(one.is_red for one in between([sanity, later], [trains()], is_running=is_running))


def test_a_rank_that_still_compiles_is_judged_by_one_that_has() -> None:
    in_progress = again(graphs=(), guards=())
    (found,) = between([trains(), in_progress], [trains(), again()], [trains()], is_running=True)
    assert not found.is_red
    (found,) = between([trains()], [trains(), in_progress], is_running=True)
    assert found.is_red, "nothing is known of it"
