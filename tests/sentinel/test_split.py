"""A region that one rank alone runs in parts: the code that Dynamo skips is named, with the line that broke it."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch

from tests.recording.test_regions import Stack
from tests.sentinel.ranks import Ranks
from tpcompile.evidence.records import SkippedFrame, UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel import protocol
from tpcompile.sentinel.counter_samples import Counted
from tpcompile.sentinel.split import split_alone

REGION = "Stack.forward model.py:3"
LINE = UserLine(file="model.py", line=5, function="forward")
BROKE_AT = UserLine(file="debug.py", line=12)
WHOLE = Counted(region=REGION, calls=4)
SKIPPED = SkippedFrame(line=LINE, reason="graph break", broke_at=BROKE_AT)
SPLIT = Counted(region=REGION, skipped=SKIPPED)


def named(*ranks: Counted) -> tuple[int, ...]:
    found = split_alone({rank: {REGION: one} for rank, one in enumerate(ranks)})
    return found.ranks if found is not None else ()


def test_a_rank_that_runs_parts_where_others_run_one_region_is_named_with_the_line_that_broke_it() -> None:
    found = split_alone({0: {REGION: WHOLE}, 1: {REGION: SPLIT}})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.GRAPH_BREAK, (1,), BROKE_AT)
    assert re.search(r"forward .*graph break .*debug\.py:12", found.observed)


def test_ranks_that_all_run_in_parts_or_have_not_come_there_are_left_alone() -> None:
    assert named(SPLIT, SPLIT) == named(WHOLE, WHOLE) == ()
    assert named(Counted(region=REGION), SPLIT) == ()
    later = SPLIT.model_copy(update={"calls": 4})
    assert named(WHOLE, later) == (), "rank 0 may come to the call that broke it"
    assert named(WHOLE.model_copy(update={"calls": 5}), later) == (1,)


def run(poisoned: tuple[int, ...], hears: bool) -> dict[str, Any]:
    """Some ranks call a debug instance first, whose graph breaks in a loop; then all call a healthy one."""
    ranks = Ranks()
    torch.compiler.reset()
    if not hears:
        protocol.split_alone = lambda _: None  # type: ignore[attr-defined]
    if ranks.rank in poisoned:
        torch.compile(Stack(debug=True), backend="eager")(torch.ones(2, 4))
    torch.manual_seed(0)
    step = torch.compile(Stack(), backend="eager", fullgraph=True)
    with ranks.sentinel(policy="warn") as sentinel:
        for _ in range(300 if poisoned == (1,) and hears else 200):
            step(torch.ones(2, 4))
            if sentinel.findings:
                break
            threading.Event().wait(0.02)
        lines = [check.line.code for verdict in sentinel.findings for check in verdict.checks if check.line]
    return ranks.summary(sentinel) | {"lines": lines}


@pytest.mark.tp(world_size=2, timeout_s=120)
def test_a_stack_that_one_rank_runs_block_by_block_is_found_though_nothing_communicates() -> None:
    found = run(poisoned=(1,), hears=True)
    ((cause, odd, observed),) = found["checks"]
    assert (cause, odd) == (Cause.GRAPH_BREAK.value, (1,))
    assert "rank 1 ran Stack.forward" in observed and re.search(r"forward .*graph break .*\.py:\d", observed)
    assert found["lines"] == ["torch._dynamo.graph_break()"]


@pytest.mark.tp(world_size=2, timeout_s=120)
@pytest.mark.parametrize(("poisoned", "hears"), [((0, 1), True), ((1,), False)])
def test_ranks_that_break_alike_are_not_reported_and_no_other_finder_sees_them(
    poisoned: tuple[int, ...], hears: bool
) -> None:
    assert run(poisoned, hears)["checks"] == []
