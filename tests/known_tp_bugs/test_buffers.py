"""Known TP bugs of the memory that a collective reads and writes: 9, 16, 21."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.known_tp_bugs.criteria import IS_OLD
from tests.known_tp_bugs.job import Found
from tpcompile.collectives import (
    all_gather_single,
    all_gather_start,
    all_reduce,
    all_to_all_single,
    reduce_scatter_single,
)
from tpcompile.collectives.strategies import Collectives

_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def residuals(comm: Collectives) -> dict[Any, float]:
    """Known TP bug 9: x + sum over ranks of x, for x = 1 everywhere."""

    def in_place(x: Tensor) -> Tensor:
        y = x.contiguous()
        dist.all_reduce(y)
        return x + y

    found = {}
    for name, program in (("mistake", in_place), ("ours", lambda x: x + comm.all_reduce(x))):
        torch._dynamo.reset()
        for mode, run in (("eager", program), ("compiled", torch.compile(program, backend="aot_eager"))):
            found[name, mode] = run(torch.ones(4, 8)).unique().item()
    return found


def _all_collectives(x: Tensor, comm: Collectives) -> tuple[Tensor, ...]:
    group = comm.group
    return (
        all_reduce(x, group=group), all_gather_single(x, dim=0, group=group), all_gather_single(x, dim=1, group=group),
        reduce_scatter_single(x, dim=0, group=group), reduce_scatter_single(x, dim=1, group=group),
        all_to_all_single(x, dim=0, group=group), all_to_all_single(x, dim=1, group=group),
    )  # fmt: skip


def strided(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 16: transposed and sliced inputs against their contiguous copies, and a sum in place."""
    base = torch.arange(96.0).view(8, 12) + 100 * comm.rank
    views = {"transposed": base.t(), "sliced": base[1:7:2, 2:].t()[:, :2], "contiguous": base}
    compiled = torch.compile(lambda x: _all_collectives(x, comm), backend="aot_eager", fullgraph=True, dynamic=False)
    found: dict[str, Any] = {}
    for name, view in views.items():
        expected = _all_collectives(view.contiguous(), comm)
        total, in_place = all_reduce(view.contiguous(), group=comm.group), view.clone()
        dist.all_reduce(in_place.contiguous())
        found[name] = {
            "contiguous": view.is_contiguous(),
            "ours": all(map(torch.equal, _all_collectives(view, comm), expected)),
            "ours compiled": name == "contiguous" or all(map(torch.equal, compiled(view), expected)),
            "in place": torch.equal(in_place, total),
        }
    found["raw"] = _raw_gather(base.t(), comm)
    return found


def _raw_gather(x: Tensor, comm: Collectives) -> str:
    ops = torch.ops._c10d_functional
    try:
        y = ops.wait_tensor(ops.all_gather_into_tensor(x, comm.size, comm.group.group_name))
    except Exception as error:  # which one it is, is what the test records of torch
        return type(error).__name__
    return "right" if torch.equal(y, all_gather_single(x, dim=0, group=comm.group)) else "wrong"


def two_in_flight(comm: Collectives) -> dict[str, list[bool]]:
    """Known TP bug 21: two gathers in flight on one group, into one workspace and into buffers of their own."""
    x, y = torch.full((4096,), 1.0 + comm.rank), torch.full((4096,), 10.0 + comm.rank)
    expected = [comm.all_gather(t, dim=0) for t in (x, y)]
    workspace = torch.empty(8192)
    works = [_gather_into(workspace, t, group=comm.group, async_op=True) for t in (x, y)]
    for work in works:
        work.wait()
    pending = [all_gather_start(t, dim=0, group=comm.group) for t in (x, y)]
    return {
        "mistake": [torch.equal(workspace, t) for t in expected],
        "ours": [torch.equal(p.wait(), t) for p, t in zip(pending, expected, strict=True)],
    }


ON_RANKS = {2: (residuals, strided, two_in_flight)}


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_bug_09_an_in_place_all_reduce_of_contiguous_overwrites_a_live_residual(two_ranks: Found, mode: str) -> None:
    assert [(r["mistake", mode], r["ours", mode]) for r in two_ranks["residuals"]] == [(4, 3), (4, 3)]


def test_bug_16_a_sum_in_place_of_a_contiguous_copy_is_lost_for_a_strided_input(two_ranks: Found) -> None:
    for r in two_ranks["strided"]:
        assert {n: r[n]["in place"] for n in ("contiguous", "transposed", "sliced")} == {
            "contiguous": True, "transposed": False, "sliced": False,
        }  # fmt: skip
        assert all(r[n]["ours"] and r[n]["ours compiled"] for n in ("contiguous", "transposed", "sliced"))


def test_bug_16_the_raw_gather_of_a_strided_input_depends_on_the_torch_version(two_ranks: Found) -> None:
    assert [r["raw"] for r in two_ranks["strided"]] == ["RuntimeError" if IS_OLD else "right"] * 2


def test_bug_21_two_gathers_in_flight_need_a_buffer_each(two_ranks: Found) -> None:
    for r in two_ranks["two_in_flight"]:
        assert not all(r["mistake"])
        assert r["ours"] == [True, True]
