"""`check_ranks` on a 2-D mesh of real gloo ranks: a DTensor model of the user's own, green, and red for one rank."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.rank_jobs import run_on_ranks
from tpcompile.evidence.records import DivergenceClass, Status, Verdict
from tpcompile.gate import check_ranks
from tpcompile.ranks.mesh import mesh_roles
from tpcompile.ranks.store import RankStore
from tpcompile.recording import CaptureSession

WORLD = 4


class Model(nn.Module):
    """A vocabulary-sharded embedding and a column/row pair."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens -> hidden."""
        hidden = self.embedding(tokens)
        return hidden + self.down(torch.relu(self.up(hidden)))


def _captured(mesh: DeviceMesh, *, scale: int) -> CaptureSession:
    torch.compiler.reset()
    model = Model()
    rows = RowwiseParallel(input_layouts=Replicate())
    plan = {"embedding": rows, "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    program = torch.compile(lambda tokens: model(tokens) * scale, backend="aot_eager")
    with CaptureSession(groups=mesh_roles(mesh)) as session, session.phase("train step"):
        program(torch.zeros(2, 5, dtype=torch.int64)).sum().backward()
    return session


def _on_rank() -> dict[str, str]:
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for name, scale in (("healthy", 2), ("one rank differs", 3 if rank == WORLD - 1 else 2)):
        verdict = check_ranks(_captured(mesh, scale=scale), mesh=mesh, timeout_s=30, store=store)
        found[name] = verdict.to_json()
    return found


@cache
def _verdicts() -> dict[str, list[Verdict]]:
    results: list[dict[str, Any]] = run_on_ranks(_on_rank, world_size=WORLD)
    return {name: [Verdict.model_validate_json(r[name]) for r in results] for name in results[0]}


def test_a_healthy_dtensor_model_is_green_on_every_rank_and_its_shard_bounds_are_listed():
    verdicts = _verdicts()["healthy"]
    assert {v.status for v in verdicts} == {Status.PASS}
    assert {d.cls for d in verdicts[0].divergences} == {DivergenceClass.RANK_PARAMETRIC}


def test_groups_of_the_mesh_axis_are_compared_apart():
    assert set(_verdicts()["healthy"][0].domains) == {"tp 0-1", "tp 2-3"}


def test_one_rank_with_another_constant_is_red_on_every_rank_and_named():
    verdicts = _verdicts()["one rank differs"]
    assert {v.exit_code for v in verdicts} == {1}
    red = [d for d in verdicts[0].divergences if d.is_red]
    assert red[0].domain == "tp 2-3"
    assert [g.ranks for g in red[0].groups] == [(2,), (3,)]
    assert red[0].title == "scale == 2 / 3"


def _left(waits: bool) -> tuple[float, float]:
    """When this rank let the store go, and when check_ranks came back; rank 1 reads its verdict a second late."""
    let_go: list[float] = []
    leave = RankStore.leave_together

    def late(store: RankStore, *, timeout_s: float) -> None:
        if store.rank == 1:
            time.sleep(1.0)
        let_go.append(time.time())
        if waits:
            leave(store, timeout_s=timeout_s)

    RankStore.leave_together = late  # type: ignore[method-assign]  # in a rank's process, which ends with this test
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    check_ranks(CaptureSession(), mesh=mesh, timeout_s=30, store=dist.distributed_c10d._get_default_store())
    return let_go[0], time.time()


@pytest.mark.parametrize("waits", [True, False])
def test_rank_0_which_may_serve_the_store_comes_back_after_the_last_rank_has_let_it_go(waits: bool):
    (_, first_back), (last_let_go, _) = run_on_ranks(_left, waits, world_size=2)
    assert (first_back > last_let_go) == waits
