"""A batch that one rank skips in a long loop is found while the loop runs, whether its steps communicate or not."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.sentinel.ranks import Ranks
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel import Sentinel, protocol

pytestmark = pytest.mark.long

STEPS, STEP_S, SKIPPED, ODD = 400, 0.02, 11, 1
QUIET_STEPS = 200
"""Of a loop in which nothing is found; what is found takes less."""


def with_a_collective(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def without_one(x: Tensor) -> Tensor:
    return x * 1


def run(name: str, *, skips: bool = True, hears: bool = True) -> dict[str, Any]:
    """Steps on this rank; a rank with a finding tells the other rank in its next collective."""
    ranks = Ranks()
    steps = STEPS if skips and hears else QUIET_STEPS
    torch.compiler.reset()
    step = torch.compile(globals()[name], backend="eager", dynamic=False)
    if not hears:
        protocol.parted_calls = lambda _: None  # type: ignore[attr-defined]
    with ranks.sentinel(policy="warn", flow=False) as sentinel:  # the counts alone
        last = 0
        for number in range(steps):
            if skips and ranks.rank == ODD and number == SKIPPED:
                continue
            found = step(torch.ones(2) * len(sentinel.findings))
            if found.sum() > 0:
                break
            last = number
            threading.Event().wait(STEP_S)
        else:
            if skips and ranks.rank == ODD and name == with_a_collective.__name__:
                step(torch.zeros(2))  # the policy goes on, and so must the other rank
        sentinel.wait_for_finding(0) if skips and hears else None
    return ranks.summary(sentinel) | {"last": last, "lines": _lines(sentinel)}


def _lines(sentinel: Sentinel) -> list[str]:
    return [check.line.code for verdict in sentinel.findings for check in verdict.checks if check.line]


@pytest.mark.tp(world_size=2, timeout_s=120)
@pytest.mark.parametrize("name", [with_a_collective.__name__, without_one.__name__])
def test_a_skipped_batch_is_found_while_the_loop_runs(name: str) -> None:
    found = run(name)
    assert found["last"] < STEPS - 1
    ((cause, odd, observed),) = found["checks"]
    assert (cause, odd) == (Cause.CALL_COUNT.value, (ODD,))
    assert re.search(f"left out .*{name} .*`number` in run", observed)
    assert found["lines"] == ["found = step(torch.ones(2) * len(sentinel.findings))"]


@pytest.mark.tp(world_size=2, timeout_s=120)
def test_ranks_that_skip_nothing_are_left_alone() -> None:
    found = run(without_one.__name__, skips=False)
    assert (found["last"], found["checks"]) == (QUIET_STEPS - 1, [])


@pytest.mark.tp(world_size=2, timeout_s=120)
def test_without_the_counts_of_the_other_rank_nothing_would_be_found() -> None:
    found = run(with_a_collective.__name__, hears=False)
    assert (found["last"], found["checks"]) == (QUIET_STEPS - 1, [])
