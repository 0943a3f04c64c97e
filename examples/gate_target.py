"""A target of `tpcompile gate`: a sharded module, and the same module on one device to compare its numbers with.

tpcompile gate --target examples.gate_target:build --nproc 2
tpcompile gate --target examples.gate_target:build --nproc 2 --set averaged=1   # red: wrong numbers, equal on all ranks
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile
from tpcompile.target import TargetContext


class FeedForward(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def build(ctx: TargetContext) -> tpcompile.Target:
    """Settings: width; averaged, for a mean over the ranks where the sum is due."""
    torch.manual_seed(0)  # equal weights on all ranks
    width = ctx.settings.get("width", 32)
    model, reference = (FeedForward(width).to(ctx.device) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, ctx.mesh["tp"], plan)
    if ctx.settings.get("averaged"):
        model.down.register_forward_hook(lambda module, inputs, output: output / ctx.world_size)
    tokens = torch.randn(2, 8, width, device=ctx.device)
    return tpcompile.Target(program=model, inputs=(tokens,), reference=reference)
