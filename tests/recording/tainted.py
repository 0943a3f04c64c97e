"""Programs that depend on the rank, or look as if they did, compiled on two gloo ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tpcompile.evidence.records import RankRecord
from tpcompile.recording import CaptureSession


class Held(nn.Module):
    """Holds what it is given as plain attributes."""

    def __init__(self, **values: object) -> None:
        super().__init__()
        self.__dict__.update(values)


class AttributeBranch(Held):
    def forward(self, x: Tensor) -> Tensor:
        if self.rank >= 0:  # MARK attribute
            x = x + 1
        return x


class AttributeConstant(Held):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale  # MARK constant


class GetRank(Held):
    def forward(self, x: Tensor) -> Tensor:
        return x * (dist.get_rank() + 1)  # MARK get_rank


class BranchWithoutEffect(Held):
    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() > 100:  # MARK branch
            x = x + 1
        return x * 2


def _which() -> int:
    return dist.get_rank()  # MARK inlined


class Inlined(Held):
    def forward(self, x: Tensor) -> Tensor:
        return x + (_which() >= 0)


class GroupRank(Held):
    def forward(self, x: Tensor) -> Tensor:
        first = self.group.rank() > 100  # MARK group
        return x + first


class MeshCoordinate(Held):
    def forward(self, x: Tensor) -> Tensor:
        first = self.mesh.get_local_rank() > 100  # MARK mesh
        return x + first


class Environment(Held):
    def forward(self, x: Tensor) -> Tensor:
        if os.environ["TAINT_TEST"] == "nobody":  # MARK environment
            x = x + 1
        return x * 2


class OrdinarySetting(Held):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if os.environ["TAINT_TEST_EQUAL"] == "1" else x


class DeviceIndex(Held):
    def forward(self, x: Tensor) -> Tensor:
        on_first = x.device.index == 0  # MARK device
        return x + on_first


class Hostname(Held):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(socket.gethostname())  # MARK hostname


class EagerOnly(Held):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and dist.get_rank() == 0:
            print("first")
        return x * 2


class RankAsData(nn.Module):
    """Keeps its rank in an attribute, and uses it as tensor data only."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = dist.get_rank()
        self.register_buffer("offset", torch.tensor([float(self.rank)]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class LowRank(Held):
    """Has a rank that is not a rank of a process."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 / self.rank)


class BatchLikeRank(Held):
    """Its batch is 1 on all ranks, as is the rank on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x[: self.batch] * 2


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def _sharded(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def records() -> dict[str, RankRecord]:
    """Every program on its own, compiled from scratch."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    os.environ |= {"TAINT_TEST": f"value {rank}", "TAINT_TEST_EQUAL": "1"}
    made: dict[str, Callable[[], nn.Module]] = {
        "attribute": lambda: AttributeBranch(rank=rank),
        "constant": lambda: AttributeConstant(scale=3 + 5 * rank),
        "get_rank": GetRank,
        "branch": BranchWithoutEffect,
        "inlined": Inlined,
        "group": lambda: GroupRank(group=mesh.get_group()),
        "mesh": lambda: MeshCoordinate(mesh=mesh),
        "environment": Environment,
        "device": DeviceIndex,
        "hostname": Hostname,
        "clean: ordinary setting": OrdinarySetting,
        "clean: eager only": EagerOnly,
        "clean: rank as data": RankAsData,
        "clean: low rank": lambda: LowRank(rank=16),
        "clean: batch like rank": lambda: BatchLikeRank(batch=1),
        "clean: sharded by DTensor": lambda: _sharded(mesh),
    }
    found = {}
    for name, make in made.items():
        torch.compiler.reset()
        torch.manual_seed(0)
        with CaptureSession(groups={mesh.get_group().group_name: "tp"}) as session, session.phase("first"):
            torch.compile(make(), backend="aot_eager")(torch.ones(4, 8))
        found[name] = session.record(rank=rank, world_size=2)
    return found
