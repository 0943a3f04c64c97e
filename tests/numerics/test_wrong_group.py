"""A sum over two of four ranks, where it has to be over all: the collective, its line and the kind of the mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.numerics import wrong_programs as w
from tpcompile.collectives import api as collectives
from tpcompile.evidence.records import MistakeKind
from tpcompile.numerics.check import check_numerics
from tpcompile.numerics.trace import Axis
from tpcompile.numerics.wrong_op import Run, wrong_op_of
from tpcompile.testing import run_on_ranks

pytestmark = pytest.mark.long
HALVES: list[dist.ProcessGroup] = []


def sum_over_half(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    group = HALVES[m.comm.rank // 2] if m.is_wrong else m.comm.group
    y = collectives.all_reduce(y, group=group, dst="I") if m.comm.size > 1 else y  # fault
    return F.rms_norm(x + y, (w.WIDTH,))


CASE = w.Case(sum_over_half, w.MLP, MistakeKind.WRONG_GROUP)


def worker() -> list[tuple[bool, list[tuple[str, str]]]]:
    HALVES[:] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = []
    for is_wrong in (True, False):
        report = check_numerics(
            lambda comm, is_wrong=is_wrong: CASE.build(comm, is_wrong=is_wrong),
            inputs=CASE.inputs, group=dist.group.WORLD, programs=("eager",), backward=False,
        )  # fmt: skip
        ops = [(op.kind.value, op.line.code if op.line else "") for op, _ranks in report.wrong_ops]
        found.append((report.passed, ops))
    return found


def test_a_sum_over_the_wrong_group_is_named_and_the_right_one_is_none() -> None:
    for wrong, right in run_on_ranks(worker, world_size=4, timeout_s=120):
        assert right == (True, [])
        passed, ((kind, code),) = wrong
        assert not passed and kind == CASE.kind and code.endswith("# fault")


def worker_with_axes() -> bool:
    """Rank 3 runs one op more than its peer along tp; ranks 0 and 1 run the same."""
    rank = dist.get_rank()
    tp = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    dp = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    x = torch.linspace(1, 2, 8)

    def call() -> dict[str, Tensor]:
        y = (x.abs() if rank == 3 else x) * 2
        dist.all_reduce(y, group=dp)
        return {"y": y}

    run, reference = Run(call, None), Run(lambda: {"y": x * 3}, None)
    axes = [Axis(2, rank // 2, dp)]
    found = wrong_op_of(
        run, [reference], ["y"], tp, dtype=torch.float32, device=torch.device("cpu"), axes=axes
    )  # fmt: skip
    return found is not None


def test_ranks_that_wait_for_each_other_along_another_axis_all_try_repairs_or_none() -> None:
    """Without that the ranks of one group would wait for those of the other, which do not try."""
    assert run_on_ranks(worker_with_axes, world_size=4, timeout_s=60) == [True] * 4
