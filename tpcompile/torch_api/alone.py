"""A world of one rank within a job of several: what a program builds there is of this rank alone.

    name                                     why
    distributed_c10d._update_default_pg      the group that is used where none is given
    distributed_c10d._world.pg_group_ranks   a group -> its ranks by their numbers in the job
    distributed_c10d._new_group_with_tag     every group is made by it, those of a mesh as well
    DeviceMesh.__init__, _root_mesh          every mesh is made by it; one with a root is a slice of that

Seen on torch 2.11.0 and 2.13.0. `tests/torch_api/test_alone.py` fails when torch moves one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def world_of_one() -> Iterator[None]:
    """Within it this process is rank 0 of 1: every group that is made has this rank alone, and so has each axis of a
    mesh, whatever their sizes.

    No other rank is waited for. Other threads of this process see the same.
    """
    world, everyone = c10d._world, c10d._get_default_group()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ranks = world.pg_group_ranks[alone]
    make_mesh = DeviceMesh.__init__

    def mesh_of_one(self: DeviceMesh, device_type: str, mesh: Any = None, **more: Any) -> None:
        layout = more.get("_layout")
        if more.get("_root_mesh") is None:
            num_axes = torch.as_tensor(mesh).dim() if layout is None else len(layout)
            mesh = torch.zeros([1] * num_axes, dtype=torch.int)
            more = {name: value for name, value in more.items() if name not in ("_layout", "_rank_map")}
        make_mesh(self, device_type, mesh, **more)

    try:
        world.pg_group_ranks[alone] = {0: 0}
        c10d._update_default_pg(alone)
        with (
            mock.patch.object(c10d, "_new_group_with_tag", lambda *_args, **_kwargs: alone),
            mock.patch.object(DeviceMesh, "__init__", mesh_of_one),
        ):
            yield
    finally:
        c10d._update_default_pg(everyone)
        world.pg_group_ranks[alone] = ranks
        dist.destroy_process_group(alone)
