"""A sum over two of four ranks, where it has to be over all: the collective, its line and the kind of the mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.numerics import wrong_programs as w
from tpcompile.collectives import api as collectives
from tpcompile.evidence.records import MistakeKind
from tpcompile.numerics.check import check_numerics
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
