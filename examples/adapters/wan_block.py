"""The Wan block of diffusers, which has no plan of its own, sharded with DTensor and our norm over all heads; trained.

torchrun --standalone --nproc-per-node 2 -m examples.adapters.wan_block
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile
from examples.adapters.one_device import BACKEND, gradients, print_errors
from tpcompile.collectives.strategies import Collectives
from tpcompile.nn.norm import DistributedRMSNorm
from tpcompile.nn.state import gather_full

HEADS, HEAD_SIZE, FFN, TOKENS, TEXT = 4, 8, 64, 12, 5


def shard(block: nn.Module, mesh: DeviceMesh) -> None:
    """Heads over the ranks; the norm of queries and keys needs the mean over all heads."""
    column, row = ColwiseParallel(), RowwiseParallel()
    plan = {"attn[12].to_[qkv]": column, "attn[12].to_out.0": row, "ffn.net.0.proj": column, "ffn.net.2": row}
    parallelize_module(block, mesh, plan)
    comm = Collectives(mesh.get_group("tp"))
    for attention in (block.attn1, block.attn2):
        attention.heads //= comm.size
        for name in ("norm_q", "norm_k"):
            whole = getattr(attention, name)
            norm = DistributedRMSNorm(whole.weight.numel(), eps=whole.eps, comm=comm)
            norm.weight = nn.Parameter(whole.weight.detach().chunk(comm.size)[comm.rank].clone())
            setattr(attention, name, norm)


def main() -> None:
    """Three steps on the same input, without an optimizer."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    width = HEADS * HEAD_SIZE
    block = WanTransformerBlock(width, FFN, HEADS, cross_attn_norm=True)
    hidden, text, modulation = torch.randn(2, TOKENS, width), torch.randn(2, TEXT, width), torch.randn(2, 6, width)
    angles = torch.randn(1, TOKENS, 1, HEAD_SIZE)
    inputs = (hidden, text, modulation, (angles.cos(), angles.sin()))
    alone = copy.deepcopy(block)
    expected = alone(*inputs)
    expected.square().mean().backward()

    shard(block, mesh)
    compiled = torch.compile(block, backend=BACKEND)

    with tpcompile.capture(mesh) as run:
        for _step in range(3):
            block.zero_grad()
            found = compiled(*inputs)
            found.square().mean().backward()
    tpcompile.check(run).print()

    grads = gradients(block)
    for name in grads:
        if ".norm_" in name:
            norm = block.get_submodule(name.rpartition(".")[0])
            grads[name] = gather_full("weight", grads[name], module=norm)
    print_errors(found, expected, grads, gradients(alone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
