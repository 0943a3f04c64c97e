"""What is tried on two gloo ranks: no rank waits for one that does not come to an op, and trying has an end."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from tpcompile.evidence.records import MistakeKind, WrongOp
from tpcompile.numerics import trials as module
from tpcompile.numerics.judged import Known
from tpcompile.numerics.repairs import REPAIRS
from tpcompile.numerics.trace import Change, Trace, Value
from tpcompile.numerics.traced import traced_call
from tpcompile.numerics.trials import Trials
from tpcompile.numerics.wrong_op import coarser
from tpcompile.testing import run_on_ranks

NUM_OPS = 5
NUM_RUNS = 43
"""Where nothing helps: each repair of each op, alone and with the others of its line, and what is kept for it."""
Found = tuple[str, int]
"""The op that was found, and how many runs were made."""


def found(
    parts: torch.Tensor, *, comes: bool = True, adds: float = 0.0, limit_s: float = 60.0, is_open: bool = True
) -> Found:
    """Of a sum over the rank's part, and products with one after it; the reference has all parts."""
    runs = 0

    def call() -> dict[str, torch.Tensor]:
        total = parts.clone().sum()
        for _ in range(NUM_OPS - 1):
            total = total * 1.0
        return {"loss": total + adds}

    def again(change: Change | None, _around: AbstractContextManager[object]) -> Trace:
        nonlocal runs
        runs += 1
        return traced_call(call, None, change=change if comes else None)

    group: Any = dist.group.WORLD
    whole = traced_call(lambda: {"loss": torch.ones(4).sum()}, None)
    trials = Trials(
        traced_call(call, None), again, Known.of([whole]), group, group,
        tolerance=1e-5, device=torch.device("cpu"), limit_s=limit_s,
    )  # fmt: skip
    item: WrongOp | None = trials.repaired(["loss"], is_open=is_open)
    return ("" if item is None else item.about), runs


def worker() -> dict[str, Found]:
    rank, half = dist.get_rank(), torch.ones(2)
    results = {
        "a sum": found(half),
        "one rank does not come to it": found(half, comes=rank == 0),
        "nothing helps": found(half, adds=0.5),
        "one rank is certain": found(half, is_open=rank == 0),
        "both are certain": found(half, is_open=False),
    }
    module._LEAST_S = 0.0
    return results | {"no time": found(half, adds=0.5, limit_s=0.0)}


def test_what_makes_the_result_right_is_found_and_trying_ends() -> None:
    ranks = run_on_ranks(worker, world_size=2, timeout_s=60)
    assert ranks[0] == ranks[1] == {
        "a sum": ("aten.sum", 2),
        "one rank does not come to it": ("", 1),
        "nothing helps": ("", NUM_RUNS),
        "one rank is certain": ("aten.sum", 2),
        "both are certain": ("", 0),
        "no time": ("", 1),
    }  # fmt: skip


def fits_offset(name: str, table: tuple[int, ...]) -> bool:
    """Of four positions on two ranks, looked up in a table by that op."""
    made = [
        Value("aten.arange", (4,), (1.0,), (), None, is_float=False),
        Value("aten.add", (4,), (1.0,), (), None, (0,), is_float=False),
        Value("a table", table, (1.0,), (), None, is_given=True),
        Value(name, (4, 8), (1.0,), (), None, (2, 1)),
    ]
    return REPAIRS["offset"].fits(0, made, 2)


def test_positions_are_moved_where_those_of_all_ranks_are_in_the_table() -> None:
    assert fits_offset("aten.index", (8, 8))
    assert not fits_offset("aten.index", (7, 8))
    assert not fits_offset("aten.embedding", (4, 64))
    assert fits_offset("aten.mul", (4, 1))


def test_a_coarser_dtype_is_named_where_the_reference_has_none() -> None:
    x = torch.ones(4)
    trace = traced_call(lambda: {"y": (x * 2).to(torch.bfloat16).float().sum()}, None)
    places = list(trace.results.values())
    single, half = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
    found = coarser(trace, places, than=single)
    assert found is not None
    assert (found.about, found.of, found.kind) == ("aten._to_copy", "bfloat16", MistakeKind.COARSER)
    assert coarser(trace, places, than=half) is None
