"""Each check of modes A, B and C passes on healthy facts and fails on broken ones, naming rank and line."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from tests.evidence.samples import broken, call, compiled, counters, divergences, guard, kernel, line, lowered, record
from tests.gate.runs import by_id
from tpcompile.choices import Mode
from tpcompile.config import RunConfig, load
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement import checks
from tpcompile.evidence.records import (
    Check,
    CheckId,
    Layer,
    PhaseCounters,
    RankRecord,
    RegionCount,
    Status,
    UserLine,
    value_item,
)
from tpcompile.fusion.baseline import Outcome, Regression
from tpcompile.gate import checks as gate_checks
from tpcompile.gate.measurements import GateFacts, GradientFactor, GraphBreaks, Schedule, TensorError

OVERWRITES = CheckId.CLOBBERED
CONFIG = load("cpu_smoke", modes=("A", "B", "C"), train=True)
WRONG = 5e5
SITES = ("/app/model.py:5", "/app/model.py:9")
COLLECTIVES = ("all_reduce(sum)", "all_gather")


def phases(**changes: PhaseCounters) -> tuple[PhaseCounters, ...]:
    """Counters of a healthy run; a keyword `C_first=...` replaces one phase."""
    steady = CONFIG.gate.steady_calls
    healthy = {
        "A/first": counters("A/first", frames=5, graphs=5, breaks=4),
        "B/first": counters("B/first"),
        "C/first": counters("C/first"),
        "C/steady": counters("C/steady", calls=steady, frames=0, graphs=0),
        "C/resized": counters("C/resized", recompiles=1),
    }
    return tuple((healthy | {key.replace("_", "/"): value for key, value in changes.items()}).values())


def error(mode: Mode, what: str, ratio: float = 1.0) -> TensorError:
    """The error of a tensor, as a multiple of the single-device error."""
    return TensorError(mode=mode, what=what, error=1e-7 * ratio, single=1e-7, ratio=ratio)


def errors(**ratios: float) -> tuple[TensorError, ...]:
    """Errors of modes B and C; a keyword `grad=...` sets one ratio of mode C."""
    names = {"forward": "forward", "grad": "grad w", "eager": "eager forward"}
    return (error("B", "forward"), *(error("C", what, ratios.get(name, 1.0)) for name, what in names.items()))


def facts(**changes: Any) -> dict[str, Any]:
    """Measured values of a healthy rank; a keyword replaces one."""
    healthy: dict[str, Any] = {
        "breaks": breaks(),
        "gradient_factor": GradientFactor(eager=1.0, compiled=2.0),
        "schedule": Schedule(declared=COLLECTIVES, compiled=COLLECTIVES),
        "errors": errors(),
    }
    return GateFacts(**(healthy | changes)).model_dump(mode="json")


def breaks(**changes: Any) -> GraphBreaks:
    """What mode A must show; a keyword replaces one value."""
    shown = GraphBreaks(sites=SITES, broken_sites=SITES, collectives_per_forward=2, regions_per_forward=3)
    return shown.model_copy(update=changes)


def healthy(rank: int, **fields: Any) -> RankRecord:
    """A rank where everything is as it should be."""
    compiles = [
        lowered(call("torch.ops.aten.mul.Tensor", "%0", "2"), kernels=(kernel(),), phase=phase)
        for phase in ("B/first", "C/first")
    ]
    target = UserLine(file="/job/model.py", line=3, function="Model.forward")
    regions = tuple(
        RegionCount(phase=f"C/{name}", target=target, calls=2, entered=2, most=1) for name in ("first", "steady")
    )
    values = {"counters": phases(), "facts": facts(), "regions": regions} | fields
    return record(rank, *values.pop("compiles", compiles), **values)


def judge(mode: str, *records: RankRecord, config: RunConfig = CONFIG) -> dict[CheckId | Layer, Check]:
    """The checks of a mode by id or layer."""
    digests = [digest_rank(r) for r in records]
    return by_id(gate_checks.MODES[mode](config, digests, divergences(*records)))


def failed(mode: str, *records: RankRecord, config: RunConfig = CONFIG) -> dict[CheckId | Layer, tuple[int, ...]]:
    """The checks that fail, with the ranks they blame."""
    found = judge(mode, *records, config=config).items()
    return {key: check.ranks for key, check in found if check.is_red}


@pytest.mark.parametrize("mode", ["A", "B", "C"])
def test_a_healthy_run_passes_every_check(mode: str) -> None:
    found = judge(mode, healthy(0), healthy(1))
    assert {c.status for c in found.values()} == {Status.PASS}
    assert all(c.mode == mode and c.expected and c.observed for c in found.values())


def test_nothing_compiled_anywhere_has_its_own_name() -> None:
    idle = {"compiles": [], "counters": (counters("C/first", frames=0, graphs=0),)}
    assert failed("C", healthy(0, **idle), healthy(1, **idle))[CheckId.COMPILED] == (0, 1)


def test_nothing_compiled_on_one_rank_blames_that_rank() -> None:
    idle = {"compiles": [], "counters": (counters("C/first", frames=0, graphs=0),)}
    found = failed("C", healthy(0), healthy(1, **idle))
    assert found[CheckId.EVERY_RANK_COMPILED] == (1,) and CheckId.COMPILED not in found


def test_two_graphs_on_one_rank_blame_it() -> None:
    assert failed("C", healthy(0), healthy(1, counters=phases(C_first=counters(frames=2, graphs=2)))) == {
        CheckId.GRAPHS: (1,)
    }


@pytest.mark.parametrize("evidence", [{"breaks": 1}, {"frames": 2}], ids=["break counter", "more frames than graphs"])
def test_each_counter_alone_shows_a_break(evidence: dict[str, int]) -> None:
    other = healthy(1, counters=phases(C_first=counters(**evidence)))
    assert failed("C", healthy(0), other) == {CheckId.UNBROKEN: (1,)}


def test_a_break_event_alone_shows_a_break_with_its_line() -> None:
    compiles = [compiled(breaks=(broken(at=4),))]
    check = judge("C", *(healthy(rank, compiles=compiles) for rank in range(2)))[CheckId.UNBROKEN]
    assert (check.status, check.ranks) == (Status.FAIL, (0, 1))
    assert str(check.line) == "/app/model.py:4 in forward" and any("print" in d for d in check.details)


def test_a_break_is_observed_by_torchs_explanation_and_counters_only_where_torch_logged_none() -> None:
    reason = "Attempted to call function marked as skipped Explanation: Dynamo cannot trace print."
    compiles = [compiled(breaks=(broken(at=4, reason=reason),))]
    counted = phases(C_first=counters(breaks=1, frames=7, graphs=2))
    told = judge("C", healthy(0), healthy(1, compiles=compiles, counters=counted))[CheckId.UNBROKEN]
    assert told.observed.startswith("1 break: ")
    bare = judge("C", healthy(0), healthy(1, counters=phases(C_first=counters(frames=7))))[CheckId.UNBROKEN]
    assert bare.observed.startswith("7 frames ")


def test_a_break_in_a_different_mode_is_not_blamed_on_this_one() -> None:
    compiles = [compiled(phase="A/first", breaks=(broken(),)), compiled()]
    assert judge("C", healthy(0, compiles=compiles))[CheckId.UNBROKEN].status == Status.PASS


def test_a_recompile_in_a_steady_call_blames_the_rank_and_says_why() -> None:
    steady = counters("C/steady", calls=CONFIG.gate.steady_calls, frames=1, graphs=1)
    reasons = ("0/0: k == 2    # y = x * k\nUser stack trace:\n",)
    again = [*healthy(1).compiles, compiled(phase="C/steady", compile_id="0/1", recompile_reasons=reasons)]
    check = judge("C", healthy(0), healthy(1, counters=phases(C_steady=steady), compiles=again))[CheckId.STEADY]
    assert (check.status, check.ranks, check.details) == (Status.FAIL, (1,), ("rank 1: 0/0: k == 2",))


def test_steady_calls_that_never_ran_prove_nothing() -> None:
    other = healthy(1, counters=phases(C_steady=counters("C/steady", calls=3, frames=0, graphs=0)))
    assert failed("C", healthy(0), other) == {CheckId.STEADY: (1,)}


LENGTH = CheckId.RESIZED


def test_two_recompiles_after_the_change_of_length_are_too_many() -> None:
    twice = {"counters": phases(C_resized=counters("C/resized", frames=2, graphs=2))}
    assert failed("C", healthy(0, **twice), healthy(1, **twice))[LENGTH] == (0, 1)


def test_a_recompile_after_the_change_of_length_on_one_rank_of_three_blames_it() -> None:
    none = {"counters": phases(C_resized=counters("C/resized", frames=0, graphs=0))}
    assert failed("C", healthy(0, **none), healthy(1), healthy(2, **none)) == {LENGTH: (1,)}


def test_no_recompile_after_the_change_of_length_is_fine() -> None:
    none = {"counters": phases(C_resized=counters("C/resized", frames=0, graphs=0))}
    assert failed("C", healthy(0, **none), healthy(1, **none)) == {}


def test_a_rank_that_never_called_the_other_length_is_blamed() -> None:
    never = healthy(1, counters=phases(C_resized=counters("C/resized", calls=0)))
    assert failed("C", healthy(0), never) == {LENGTH: (1,)}


def test_a_break_after_the_change_of_length_has_its_own_check() -> None:
    other = healthy(1, counters=phases(C_resized=counters("C/resized", breaks=1)))
    assert failed("C", healthy(0), other) == {CheckId.UNBROKEN_RESIZED: (1,)}


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        ("graph", {"graphs": compiled(call("mul", "%0", "9", at=12)).graphs}),
        ("guards", {"guards": (guard(says="== 9", at=12),)}),
    ],
)
def test_a_layer_that_differs_fails_its_check_with_rank_and_line(layer: str, change: dict[str, Any]) -> None:
    check = judge("C", *(healthy(rank, compiles=[compiled()]) for rank in range(3)),
                  healthy(3, compiles=[compiled(**change)]))[layer]  # fmt: skip
    assert (check.status, check.ranks, str(check.line)) == (Status.FAIL, (3,), "/app/model.py:12 in forward")


def test_a_different_environment_fails_its_check() -> None:
    assert failed("C", healthy(0), healthy(1, environment=(("torch", "2.11"),))) == {Layer.ENVIRONMENT: (0, 1)}


def test_a_divergence_of_a_different_mode_leaves_this_one_green() -> None:
    other = [compiled(call("mul", "%0", "9"), phase="B/first"), compiled()]
    ranks = healthy(0, compiles=[compiled(phase="B/first"), compiled()]), healthy(1, compiles=other)
    assert Layer.GRAPH in failed("B", *ranks)
    assert failed("C", *ranks) == {}


def test_a_layer_that_no_rank_observed_is_skipped_and_not_called_equal() -> None:
    check = judge("C", healthy(0, compiles=[compiled()]), healthy(1, compiles=[compiled()]))[Layer.KERNELS]
    assert check.status == Status.SKIPPED


def test_a_green_difference_is_mentioned_in_its_check() -> None:
    def rank(number: int) -> RankRecord:
        bound = call("torch.ops.aten.lt.Scalar", "%0", str(32 * number), value="b8[4, 8][8, 1]cpu")
        return healthy(number, compiles=[lowered(bound)])

    check = judge("C", rank(0), rank(1))[Layer.LOWERED]
    assert check.status == Status.PASS and "rank-parametric" in check.observed and check.details


SCHEDULE = CheckId.SCHEDULE


@pytest.mark.parametrize(
    ("seen", "shown"),
    [
        (("all_reduce(max)", "all_gather"), "all_reduce(max)"),
        (("all_gather", "all_reduce(sum)"), "#0"),
        (("all_reduce(sum)",), "all_gather"),
        ((*COLLECTIVES, "broadcast"), "broadcast"),
    ],
    ids=["another", "another order", "missing", "extra"],
)
def test_a_schedule_that_is_not_the_declared_one_fails(seen: tuple[str, ...], shown: str) -> None:
    schedule = Schedule(declared=COLLECTIVES, compiled=seen, lines=SITES)
    other = healthy(1, facts=facts(schedule=schedule))
    check = judge("C", healthy(0), other)[SCHEDULE]
    assert (check.status, check.ranks) == (Status.FAIL, (1,))
    assert shown in check.observed and any(SITES[0] in d for d in check.details)


@pytest.mark.parametrize(
    ("key", "name"),
    [("forward", CheckId.FORWARD), ("grad", CheckId.GRADIENTS), ("eager", CheckId.EAGER)],
)
@pytest.mark.parametrize("ratio", [WRONG, math.inf, math.nan])
def test_a_wrong_number_fails_its_check_and_names_the_rank(key: str, name: str, ratio: float) -> None:
    other = healthy(1, facts=facts(errors=errors(**{key: ratio})))
    check = judge("C", healthy(0), other)[name]
    assert (check.status, check.ranks) == (Status.FAIL, (1,)) and "on rank 1" in check.observed
    assert failed("C", healthy(0), other) == {name: (1,)}


def test_an_error_just_within_the_limit_passes() -> None:
    assert failed("C", healthy(0, facts=facts(errors=errors(forward=CONFIG.gate.error_ratio)))) == {}


def test_the_first_wrong_module_is_named() -> None:
    other = healthy(1, facts=facts(errors=errors(forward=WRONG), first_wrong="blocks.0.norm"))
    assert any("blocks.0.norm" in d for d in judge("C", healthy(0), other)[CheckId.FORWARD].details)


def test_numbers_that_were_never_measured_fail() -> None:
    without = facts(errors=())
    found = failed("C", healthy(0, facts=without), healthy(1, facts=without))
    assert set(found) == {CheckId.FORWARD, CheckId.GRADIENTS, CheckId.EAGER}


def test_numbers_that_one_rank_never_measured_fail_on_it() -> None:
    without = facts(errors=[e for e in errors() if (e.mode, e.what) != ("C", "forward")])
    assert failed("C", healthy(0), healthy(1, facts=without)) == {CheckId.FORWARD: (1,)}


def test_gradients_are_judged_only_when_the_run_trains() -> None:
    config = load("cpu_smoke")
    without = facts(errors=[e for e in errors() if e.what != "grad w"])
    assert CheckId.GRADIENTS not in judge("C", healthy(0, facts=without), config=config)


def test_an_undeclared_custom_op_is_named_with_its_line() -> None:
    item = value_item("my::norm", "in the dynamo graph", line=line(7))
    check = judge("C", healthy(0), healthy(1, refused_ops=(item,)))[CheckId.TP_AWARE]
    assert (check.status, check.ranks, str(check.line)) == (Status.FAIL, (1,), "/app/model.py:7 in forward")
    assert check.observed == "my::norm"


def test_a_reduce_that_overwrites_what_is_read_later_is_named_with_its_line() -> None:
    code = "a = reinterpret_tensor(b, (3, 1), (2, 1), 0)  # alias\n_c10d_functional.all_reduce_.default(b)\nkernel(a)"
    wrapper = kernel(code).model_copy(update={"kind": "call"})
    name, compiled_ = OVERWRITES, healthy(1).compiles
    bad = [c.model_copy(update={"kernels": (*c.kernels, wrapper)}) for c in compiled_ if c.phase == "C/first"]
    check = judge("C", healthy(0), healthy(1, compiles=bad))[name]
    assert (check.status, check.ranks, str(check.line)) == (Status.FAIL, (1,), "/app/model.py:5 in forward")
    assert re.search("all-reduce #0 .*forward app/model.py:3", check.observed)


def test_without_generated_code_nothing_is_said_about_what_a_reduce_overwrites() -> None:
    unseen = [c.model_copy(update={"kernels": ()}) for c in healthy(0).compiles]
    found = judge("C", *(healthy(rank, compiles=unseen) for rank in (0, 1)))[OVERWRITES]
    assert (found.status, found.observed) == (Status.SKIPPED, "not observed")


def test_mode_a_passes_with_breaks_and_its_row_says_that_they_are_expected() -> None:
    check = judge("A", healthy(0), healthy(1))[CheckId.BREAKS_EVERYWHERE]
    assert check.status == Status.PASS and f"{len(SITES)} sites" in check.observed


def test_mode_a_fails_when_a_collective_does_not_break_the_graph() -> None:
    check = judge("A", healthy(0), healthy(1, facts=facts(breaks=breaks(broken_sites=SITES[:1]))))[
        CheckId.BREAKS_EVERYWHERE
    ]
    assert (check.status, check.ranks) == (Status.FAIL, (1,)) and SITES[1] in check.observed


def test_mode_a_fails_when_regions_do_not_exceed_collectives() -> None:
    found = failed("A", healthy(0), healthy(1, facts=facts(breaks=breaks(regions_per_forward=2))))
    assert found == {CheckId.MANY_REGIONS: (1,)}


def test_mode_a_is_skipped_without_collectives() -> None:
    found = judge("A", healthy(0, facts=facts(breaks=breaks(collectives_per_forward=0))))
    assert {c.status for c in found.values()} == {Status.SKIPPED}


@pytest.mark.parametrize(
    "factor",
    [GradientFactor(eager=2.0, compiled=2.0), GradientFactor(eager=1.0, compiled=1.0), GradientFactor(eager=1.0)],
)
def test_mode_b_fails_when_the_gradient_is_not_multiplied(factor: GradientFactor) -> None:
    assert failed("B", healthy(0), healthy(1, facts=facts(gradient_factor=factor))) == {CheckId.GRADIENT_FACTOR: (1,)}


def test_mode_b_has_no_trap_on_one_rank() -> None:
    assert judge("B", healthy(0))[CheckId.GRADIENT_FACTOR].status == Status.SKIPPED


@pytest.mark.parametrize("mode", ["A", "B", "C"])
def test_without_any_digest_a_mode_can_still_be_judged(mode: str) -> None:
    assert all(c.status in (Status.FAIL, Status.PASS, Status.SKIPPED) for c in judge(mode).values())


def test_a_run_that_ended_early_keeps_what_was_seen_and_skips_what_never_happened() -> None:
    never = healthy(1, compiles=[compiled(breaks=(broken(),))], counters=(counters(),), facts={})
    ended = {c.layer or c.id: c.status for c in checks.ended_early(list(judge("C", healthy(0), never).values()))}
    assert ended[CheckId.UNBROKEN] == ended[Layer.GRAPH] == Status.FAIL
    assert ended[CheckId.STEADY] == ended[CheckId.FORWARD] == Status.SKIPPED


def test_timings_are_those_of_the_slowest_rank() -> None:
    ranks = [healthy(rank, facts=facts(median_ms={"C": 2.0 + rank, "B": 5.0})) for rank in range(2)]
    assert gate_checks.timings([digest_rank(r) for r in ranks]) == {"B": 5.0, "C": 3.0}


def test_a_call_that_enters_two_regions_turns_mode_c_red() -> None:
    target = UserLine(file="/job/model.py", line=3, function="Model.forward")
    at = UserLine(file="/job/model.py", line=5, function="forward")
    split = RegionCount(phase="C/steady", target=target, calls=2, entered=4, most=2, runs_at=at)
    assert failed("C", healthy(0), healthy(1, regions=(split,))) == {CheckId.ONE_REGION: (1,)}


def with_baseline(**overrides: Any) -> RunConfig:
    return load("cpu_smoke", ["gate.fusion_baseline=/app/fusion.json"], modes=("C",), train=True, **overrides)


@pytest.mark.parametrize(
    ("outcome", "status", "says"),
    [
        (Outcome(), Status.PASS, "as in the baseline"),
        (Outcome(regressions=(Regression(says="2 kernels instead of 1"),)), Status.FAIL, "2 kernels instead of 1"),
        (Outcome(why_not="the code came from a cache"), Status.FAIL, "not compared: the code came from a cache"),
    ],
)
def test_a_baseline_that_was_asked_for_and_not_compared_is_red_too(outcome: Outcome, status: Status, says: str) -> None:
    ranks = [healthy(rank, facts=facts(fusion=outcome)) for rank in range(2)]
    check = judge("C", *ranks, config=with_baseline())[CheckId.FUSION]
    assert (check.status, check.observed) == (status, says)
    assert CheckId.FUSION not in judge("C", *ranks)
