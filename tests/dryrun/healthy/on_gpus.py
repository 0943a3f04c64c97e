"""Programs as they are written for GPUs: devices by name, streams, events, autocast, generators, pinned memory."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.dryrun.healthy.by_hand import Network
from tests.dryrun.healthy.plans import Block, Model
from tpcompile.target import Target, TargetContext

WIDTH = 64


def _parallel(block: Block, ctx: TargetContext) -> Block:
    plan = {
        "attention.w[qkv]": ColwiseParallel(), "attention.wo": RowwiseParallel(),
        "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel(),
    }  # fmt: skip
    return parallelize_module(block, ctx.mesh["tp"], plan)


def moved(ctx: TargetContext) -> Target:
    """A model made on the CPU and moved; inputs made on the GPU."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    block = _parallel(Block().cuda(), ctx)
    x = torch.randn(2, 16, WIDTH, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))
    torch.cuda.synchronize()
    return Target(program=torch.compile(block, mode="max-autotune"), inputs=(x,), is_compiled=True)


def by_index(ctx: TargetContext) -> Target:
    """A device by its index, as torchrun's documentation has it."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    block = Block().to(device=device, dtype=torch.bfloat16)
    x = torch.randn(2, 16, WIDTH).to(device, torch.bfloat16, non_blocking=True)
    assert x.is_cuda
    assert x.device.type == "cuda"
    assert next(block.parameters()).is_cuda
    return Target(program=_parallel(block, ctx), inputs=(x,))


def default_device(ctx: TargetContext) -> Target:
    """`torch.set_default_device` and `with torch.device`."""
    torch.set_default_device("cuda")
    with torch.device("cuda"):
        block = Network(ctx.mesh.get_group("tp"))
    return Target(program=block, inputs=(torch.randn(2, 16, WIDTH),))


class Autocast(nn.Module):
    """Half precision within, and a scale."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.inner(x)
        scale = torch.ones(y.shape[-1], device="cuda")
        return y.float() * scale + torch.arange(WIDTH, device=x.device)


def autocast(ctx: TargetContext) -> Target:
    """Autocast and a tensor that is made in the compiled region."""
    block = Autocast(Network(ctx.mesh.get_group("tp"))).to("cuda")
    return Target(program=block, inputs=(torch.randn(2, 16, WIDTH, device="cuda"),))


def autocast_around(ctx: TargetContext) -> Target:
    """Autocast around the compiled region, and a gradient scaler."""
    block = Network(ctx.mesh.get_group("tp")).to("cuda")
    scaler = torch.amp.GradScaler("cuda")

    def step(program: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = program(*inputs).square().mean()
        scaler.scale(loss).backward()
        return loss

    return Target(program=block, inputs=(torch.randn(2, 16, WIDTH, device="cuda"),), step=step)


def chosen_by_capability(ctx: TargetContext) -> Target:
    """The program asks what GPU it has, and how many."""
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() >= 1
    major, _minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name(0)
    memory = torch.cuda.get_device_properties(0).total_memory
    dtype = torch.bfloat16 if major >= 8 and torch.cuda.is_bf16_supported() else torch.float16
    assert name
    assert memory > 0
    block = Network(ctx.mesh.get_group("tp")).to("cuda", dtype)
    return Target(program=block, inputs=(torch.randn(2, 16, WIDTH, device="cuda", dtype=dtype),))


def streams(ctx: TargetContext) -> Target:
    """Streams, events and pinned memory around the compiled region."""
    block = Network(ctx.mesh.get_group("tp")).cuda()
    side = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    x = torch.randn(2, 16, WIDTH).pin_memory()

    def step(program: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        start.record()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            on_gpu = inputs[0].to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        on_gpu.record_stream(torch.cuda.current_stream())
        y = program(on_gpu)
        end.record()
        end.synchronize()
        start.elapsed_time(end)
        torch.cuda.empty_cache()
        torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.max_memory_allocated()
        return y

    return Target(program=block, inputs=(x,), step=step)


def own_mesh(ctx: TargetContext) -> Target:
    """Groups and a mesh of its own, on NCCL."""
    if not dist.is_initialized():
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    mesh = init_device_mesh("cuda", (ctx.world_size,), mesh_dim_names=("tp",))
    dist.barrier()
    model = Model(1).cuda()
    parallelize_module(model.blocks[0], mesh, {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
    ids = torch.randint(128, (2, 32), device="cuda")
    return Target(program=model, inputs=(ids,), mesh=mesh)


def seeded(ctx: TargetContext) -> Target:
    """Dropout, and generators that are seeded."""
    torch.cuda.manual_seed_all(1)
    torch.manual_seed(1)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)

    def program(x: Tensor) -> Tensor:
        return F.dropout(x.relu(), 0.1, training=True) + torch.rand_like(x)

    return Target(program=program, inputs=(torch.randn(4, WIDTH, device="cuda"),))


def in_the_region(ctx: TargetContext) -> Target:
    """What traced code asks of the GPU."""

    def program(x: Tensor) -> Tensor:
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8:
            x = x.bfloat16()
        y = torch.zeros(WIDTH, device="cuda") + x.to("cuda")
        return y.cuda().half() if y.is_cuda else y

    return Target(program=program, inputs=(torch.randn(4, WIDTH, device="cuda"),))
