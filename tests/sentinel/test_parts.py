"""Some ranks compile the whole, others parts of it, and nothing seen would hold them up: they are named at the end."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.recording.test_regions import Stack
from tests.sentinel.ranks import Ranks
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.causes import Cause
from tpcompile.sentinel import protocol
from tpcompile.sentinel.counter_samples import Counted
from tpcompile.sentinel.split import parts_alone
from tpcompile.testing import run_on_ranks

STACK, BLOCK = "Stack.forward model.py:10", "Block.forward model.py:3"
IN_MAIN = UserLine(file="train.py", line=7, function="main")
IN_STACK = UserLine(file="model.py", line=12, function="forward")
WHOLE = {STACK: Counted(region=STACK, stack=(IN_MAIN,), calls=3)}
PART = {BLOCK: Counted(region=BLOCK, stack=(IN_MAIN, IN_STACK), calls=6, is_over=True)}


def ranks_named(*tables: dict[str, Counted]) -> tuple[int, ...]:
    found = parts_alone(dict(enumerate(tables)))
    return found.ranks if found is not None else ()


def test_a_part_that_one_rank_compiled_inside_of_what_others_compiled_is_named_at_its_call() -> None:
    found = parts_alone({0: PART, 1: WHOLE, 2: WHOLE})
    assert found is not None
    assert (found.cause, found.ranks, found.line) == (Cause.REGIONAL_COMPILE, (0,), IN_STACK)
    assert "ranks 1-2 compiled Stack.forward" in found.observed and "compiled Block.forward" in found.observed


def test_the_side_of_fewer_ranks_is_named_and_both_where_there_is_none() -> None:
    assert ranks_named(PART, PART, WHOLE) == (2,)
    assert ranks_named(PART, WHOLE) == (0, 1)


@pytest.mark.parametrize(
    "part",
    [
        {BLOCK: PART[BLOCK].model_copy(update={"is_over": False})},
        {BLOCK: PART[BLOCK].model_copy(update={"stack": (IN_MAIN,)})},
        WHOLE | PART,
    ],
    ids=["may compile it later", "an evaluation elsewhere", "compiled both"],
)
def test_what_may_be_healthy_is_not_reported(part: dict[str, Counted]) -> None:
    assert ranks_named(part, WHOLE) == ()


def test_a_part_that_both_compiled_is_left_alone() -> None:
    assert ranks_named(PART, WHOLE | PART) == ()


def run(regional: tuple[int, ...], hears: bool) -> dict[str, Any]:
    """Some ranks compile block by block, the others the stack."""
    ranks = Ranks()
    torch.compiler.reset()
    if not hears:
        protocol.parts_alone = lambda _: None  # type: ignore[attr-defined]
    stack = Stack()
    is_regional = ranks.rank in regional
    if is_regional:
        for block in stack.blocks:
            block.compile(backend="eager")
    step = stack if is_regional else torch.compile(stack, backend="eager")
    with ranks.sentinel(policy="warn") as sentinel:
        for _ in range(3):
            step(torch.ones(2, 4))
    return ranks.summary(sentinel)


def test_a_rank_that_compiles_block_by_block_is_found_though_nothing_communicates() -> None:
    found = [rank["checks"] for rank in run_on_ranks(run, (1,), True, timeout_s=120)]
    ((cause, odd, observed),) = max(found, key=len)
    assert (cause, odd) == (Cause.REGIONAL_COMPILE.value, (0, 1))
    assert re.search(r"rank 1 .*without compiling.* compiled Block\.forward", observed)


@pytest.mark.tp(world_size=2, timeout_s=120)
@pytest.mark.parametrize(("regional", "hears"), [((0, 1), True), ((), True), ((1,), False)])
def test_ranks_that_compile_alike_are_not_reported_and_no_other_finder_sees_them(
    regional: tuple[int, ...], hears: bool
) -> None:
    assert run(regional, hears)["checks"] == []
