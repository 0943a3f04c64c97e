"""A world of one rank within a job of four."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import new_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tpcompile.torch_api.alone import world_of_one


def number_of_ranks(group: dist.ProcessGroup | None = None) -> float:
    """As a sum over them says."""
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    return ones.item()


def mesh_2x2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


GROUPS: dict[str, Callable[[], dist.ProcessGroup | None]] = {
    "default": lambda: None,
    "new": lambda: new_group([2, 3]),  # not of this name in the module of torch
    "axis": lambda: mesh_2x2().get_group("tp"),
    "slice": lambda: mesh_2x2()["dp"].get_group(),
    "flattened": lambda: mesh_2x2()._flatten("all").get_group(),
    "of ranks": lambda: DeviceMesh("cpu", [[0, 1], [2, 3]]).get_group(1),
}


@pytest.mark.tp(world_size=4)
def test_each_group_and_axis_is_of_this_rank() -> None:
    before = dist.get_rank(), dist.get_world_size()
    with world_of_one():
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert {name: number_of_ranks(make()) for name, make in GROUPS.items()} == dict.fromkeys(GROUPS, 1.0)
        mesh = mesh_2x2()
        assert (mesh.shape, mesh["tp"].size(), mesh.get_local_rank("dp")) == ((1, 1), 1, 0)
        dist.broadcast(torch.ones(1), src=0, group=new_group([3]))
        sharded = distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)])
        assert len(sharded.to_local()) == 4
    assert (dist.get_rank(), dist.get_world_size()) == before


@pytest.mark.tp(world_size=4)
def test_what_is_made_afterwards_is_of_all_ranks() -> None:
    with pytest.raises(ValueError, match="of the program"), world_of_one():
        raise ValueError("of the program")
    assert number_of_ranks() == 4.0
    mesh = mesh_2x2()
    assert (mesh.shape, number_of_ranks(mesh.get_group("tp"))) == ((2, 2), 2.0)
