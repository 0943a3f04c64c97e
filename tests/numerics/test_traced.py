"""The numbers of a collective that a functional collective has begun are those that the op after it waits for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tpcompile.numerics.fingerprints import fingerprint
from tpcompile.numerics.traced import traced_call
from tpcompile.testing import run_on_ranks


def worker() -> dict[str, tuple[bool, bool]]:
    """Op -> whether its result was there later, and is the sum of both ranks then."""
    group: Any = dist.group.WORLD
    mine = torch.arange(8.0).view(4, 2) * (dist.get_rank() + 1)

    def call() -> dict[str, torch.Tensor]:
        part = funcol.reduce_scatter_tensor(mine, "sum", 0, group)  # not waited for
        return {"y": torch.relu(part.view(2, 2))}

    trace = traced_call(call, None)
    wanted = fingerprint(3 * torch.arange(8.0).view(4, 2).chunk(2)[dist.get_rank()])
    return {value.name: (value.is_late, value.tensor == wanted) for value in trace.values if not value.is_given}


def test_the_result_of_a_collective_is_known_once_an_op_has_waited_for_it() -> None:
    for found in run_on_ranks(worker, world_size=2, timeout_s=60):
        assert found["_c10d_functional.reduce_scatter_tensor"] == (True, True)
        assert found["aten.view"] == (True, True)
        assert found["aten.relu"] == (False, True)
