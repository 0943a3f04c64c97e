"""`check_setup` on four gloo ranks in a 2-D mesh: groups of the axis are compared apart, the topology is one."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tpcompile.evidence.records import Status, Verdict
from tpcompile.preflight import InputCheck, check_setup
from tpcompile.preflight.fact_exchange import RankStore
from tpcompile.testing import run_on_ranks

WORLD = 4


def _sharded_over_both(mesh: DeviceMesh) -> nn.Module:
    """A weight of 10 rows sharded over dp, then tp: 3, 2, 3, 2 rows; a norm sharded over dp, replicated over tp."""
    module, rank = nn.Module(), dist.get_rank()
    local = torch.full((3 - rank % 2, 2), float(rank))
    module.up = nn.Parameter(
        DTensor.from_local(local, mesh, [Shard(0), Shard(0)], run_check=False, shape=torch.Size([10, 2]), stride=(2, 1))
    )
    norm = torch.full((4,), float(rank // 2))
    module.norm = nn.Parameter(DTensor.from_local(norm, mesh, [Shard(0), Replicate()], run_check=False))
    return module


def _on_rank() -> dict[str, str]:
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    options: dict[str, Any] = {"mesh": mesh, "store": store, "timeout_s": 20.0}
    written: list[str] = []
    put = RankStore.put

    def counting(self: RankStore, key: str, value: Any) -> None:
        written.append(key)
        put(self, key, value)

    with mock.patch.object(RankStore, "put", counting):
        found = {"clean": check_setup(_sharded_over_both(mesh), resolved={"stage": f"{rank // 2}"}, **options)}
    with mock.patch.dict(os.environ, {"NCCL_ALGO": "Ring"} if rank == 3 else {}):
        found["one_of_group"] = check_setup(**options)
        found["one of all"] = check_setup(store=store, timeout_s=20.0)
    odd = DeviceMesh("cpu", mesh.mesh.t().contiguous(), mesh_dim_names=("dp", "tp"))
    found["another mesh"] = check_setup(**options | {"mesh": odd if rank == 2 else mesh})
    module = nn.Linear(3, 3, bias=False)
    nn.init.constant_(module.weight, float(rank % 2))
    found["along dp"] = check_setup(module, axis="dp", sharded=[], **options)
    found["along tp"] = check_setup(module, axis="tp", sharded=[], **options)
    x = torch.full((3,), float(rank // 2))
    found["inputs"] = InputCheck(mesh=mesh, store=store, timeout_s=20.0).check(x)
    return {name: verdict.to_json() for name, verdict in found.items()} | {"written": json.dumps(written)}


@cache
def results() -> list[dict[str, str]]:
    """The verdicts of all ranks."""
    return run_on_ranks(_on_rank, world_size=WORLD, timeout_s=150)


def verdict(name: str, rank: int = 0) -> Verdict:
    """The verdict one rank holds."""
    return Verdict.model_validate_json(results()[rank][name])


def test_groups_may_differ_from_each_other() -> None:
    found = verdict("clean")
    assert (found.status, found.divergences) == (Status.PASS, ())
    assert set(found.domains) == {"tp 0-1", "tp 2-3"}


def test_all_ranks_hold_one_verdict() -> None:
    assert len({found["one_of_group"] for found in results()}) == 1


def test_a_difference_inside_a_group_names_that_group() -> None:
    (found,) = verdict("one_of_group").divergences
    assert (found.domain, found.title.partition(":")[0]) == ("tp 2-3", "env NCCL_ALGO")
    assert [group.ranks for group in found.groups] == [(2,), (3,)]


def test_the_odd_rank_is_blamed_when_there_is_a_majority() -> None:
    found = verdict("one of all")
    (different,) = found.divergences
    assert different.title.startswith("env NCCL_ALGO") and different.title in found.summary
    assert [group.ranks for group in different.groups] == [(0, 1, 2), (3,)]
    assert [c.ranks for c in found.checks if c.status == Status.FAIL] == [(3,)]


def test_a_rank_with_a_different_mesh_is_named_although_it_claims_a_different_group() -> None:
    (found,) = [d for d in verdict("another mesh").divergences if "mesh ranks" in d.title]
    assert [group.ranks for group in found.groups] == [(0, 1, 3), (2,)]
    assert "[[0, 2], [1, 3]]" in found.title and "[[0, 1], [2, 3]]" in found.title


def test_the_axis_says_which_ranks_are_replicas() -> None:
    assert verdict("along dp").status == Status.PASS
    assert {d.domain for d in verdict("along tp").divergences} == {"tp 0-1", "tp 2-3"}


def test_inputs_are_compared_inside_the_group_only() -> None:
    for rank in range(WORLD):
        assert verdict("inputs", rank).status == Status.PASS


def test_rank_answers_only_what_its_group_differs_in() -> None:
    answers = [[key for key in json.loads(found["written"]) if key.startswith("answer/")] for found in results()]
    # Rank 1 has shards of another shape than rank 0; rank 2 another stage and norm; all of rank 3 is known by then.
    assert [len(keys) for keys in answers] == [0, 1, 2, 0]
