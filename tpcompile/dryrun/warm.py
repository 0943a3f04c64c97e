"""A small block of our own, compiled once -> what torch imports and builds when it first compiles, for all ranks."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tpcompile.dryrun.machine import META
from tpcompile.recording import CaptureSession
from tpcompile.torch_api.generated import generating_backend, without_caches
from tpcompile.torch_api.no_gpu import empty_tensors, without_guard
from tpcompile.typecheck.check import fake_ranks


class _Block(nn.Module):
    """Embedding, norm, attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(16, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """[B, S] -> [B, S, D]."""
        x_BSD = self.embedding(ids_BS)
        x_BHSd = self.norm(x_BSD).unflatten(-1, (2, 8)).transpose(1, 2)
        y_BHSd = F.scaled_dot_product_attention(x_BHSd, x_BHSd, x_BHSd, is_causal=True)
        y_BSD = y_BHSd.transpose(1, 2).flatten(-2)
        return x_BSD + self.down(F.silu(self.up(y_BSD)))


def warm_up(world_size: int) -> None:
    """Compile the block as rank 0 of so many, one more than the job has.

    Caches of torch that know a mesh know one that no rank of the job is in; nothing of the user's has run.
    """
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    with without_guard(), fake_ranks(world_size) as group:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        assert group.size() == mesh.size()
        with CaptureSession() as session:
            for backend in ("eager", "aot_eager"):
                _compile(mesh, backend)
        session.record(rank=0, world_size=world_size)
    torch.compiler.reset()


def _compile(mesh: DeviceMesh, backend: str) -> None:
    """The block, split over the ranks, and its backward."""
    num_ranks = mesh.size()
    with META:
        block, ids_BS = _Block(), torch.zeros(1, 4, dtype=torch.long)
    block.up.weight = nn.Parameter(torch.empty(num_ranks, 16, device=META))
    block.up.bias = nn.Parameter(torch.empty(num_ranks, device=META))
    block.down.weight = nn.Parameter(torch.empty(16, num_ranks, device=META))
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
    torch.compile(block, backend=backend)(ids_BS).sum().backward()


def generate_once() -> None:
    """Generate code for a GPU that is not there, once for all ranks.

    Without a backward pass: it starts threads for each GPU, which a forked rank would not have.
    """
    with empty_tensors(), without_caches(), torch.no_grad():
        x = torch.empty(16, 16, device="cuda")
        torch.compile(lambda x: (x @ x).relu(), backend=generating_backend())(x)
    torch.compiler.reset()
