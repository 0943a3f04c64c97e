"""A kernel that may not run on a shard is reported once in a running job, which goes on."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._triton
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.sentinel.ranks import Ranks
from tpcompile.testing import run_on_ranks

pytest.importorskip("triton")
NORM = "tests.fastpath.kernels.norm_kernel"


def on_rank() -> dict[str, dict[str, Any]]:
    """Name of each run -> what the sentinel found and wrote on this rank."""
    world_size = dist.get_world_size()
    torch.utils._triton.has_triton = lambda: True  # type: ignore[assignment]  # in a rank's process, which ends here
    sharded = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    alone = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp"))
    return {
        "refused": watched("single_gpu", sharded),
        "in the backward": watched("backward_only", sharded),
        "allowed": watched("single_gpu", sharded, tp_aware=("norm_kernel",)),
        "without shards": watched("single_gpu", alone),
        "without a mesh": watched("single_gpu", None),
    }


def watched(program: str, mesh: DeviceMesh | None, *, tp_aware: tuple[str, ...] = ()) -> dict[str, Any]:
    """Two compiles and several calls of the program under a sentinel whose policy is to stop."""
    from tests.fastpath import banned  # imports Triton

    torch.compiler.reset()
    banned.registry._REGISTERED.clear()
    step = banned.PROGRAMS[program]()
    shown = torch.compile(step, backend=banned.traced_only, dynamic=False)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        with Ranks().sentinel(mesh=mesh, policy="stop", tp_aware=("traced_only", *tp_aware)) as sentinel:
            for size in (4, 4, 5, 5):
                shown(torch.ones(size, requires_grad=True))
        dist.barrier()
    return {
        "checks": [(check.observed, check.line and check.line.code) for v in sentinel.findings for check in v.checks],
        "summaries": [verdict.summary for verdict in sentinel.findings],
        "compiles": sentinel.stats["compiles"],
        "written": [line for line in stderr.getvalue().splitlines() if "may not run on a shard" in line],
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_on_ranks(on_rank, world_size=2, timeout_s=200)


@pytest.mark.parametrize(("run", "code"), [("refused", "# the user's line"), ("in the backward", "# only here")])
def test_a_kernel_that_is_refused_is_a_finding_of_each_rank_once_and_the_job_goes_on(
    ranks: list[dict[str, dict[str, Any]]], run: str, code: str
) -> None:
    for rank in ranks:
        ((observed, users),) = rank[run]["checks"]
        assert (observed, rank[run]["compiles"]) == (NORM, 2)
        assert code in users and NORM in rank[run]["summaries"][0]
    (written,) = [line for rank in ranks for line in rank[run]["written"]]
    assert re.search(rf"{NORM} .*kernels\.py:\d+ in norm_kernel .*banned\.py:\d+", written)


@pytest.mark.parametrize("run", ["allowed", "without shards", "without a mesh"])
def test_a_kernel_that_may_run_is_no_finding(ranks: list[dict[str, dict[str, Any]]], run: str) -> None:
    for rank in ranks:
        assert (rank[run]["checks"], rank[run]["written"], rank[run]["compiles"]) == ([], [], 2)
