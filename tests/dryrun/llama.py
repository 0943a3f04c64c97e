"""A Llama on a DTensor plan, in a program that reads its rank as training scripts do, and faults of one rank in it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile
from tpcompile.target import TargetContext

# B batch, S sequence, D model dim, H heads on this rank, K heads of keys on this rank, d head dim, V vocabulary
SIZES = {"small": (64, 4, 2, 128, 256), "8b": (4096, 32, 8, 14336, 128256), "70b": (8192, 64, 8, 28672, 128256)}
"""Name -> D, heads, heads of keys, hidden size of the feed-forward network, V."""
PLAN = {
    "wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel(), "wo": RowwiseParallel(),
    "w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel(),
}  # fmt: skip


def _linear(num_in: int, num_out: int) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=False)


class Block(nn.Module):
    """Attention with grouped heads of keys and values, and a gated feed-forward network."""

    def __init__(self, size: str) -> None:
        super().__init__()
        width, heads, kv_heads, hidden, _ = SIZES[size]
        self.head_dim = width // heads
        kv_width = kv_heads * self.head_dim
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv = _linear(width, width), _linear(width, kv_width), _linear(width, kv_width)
        self.wo = _linear(width, width)
        self.w1, self.w3, self.w2 = _linear(width, hidden), _linear(width, hidden), _linear(hidden, width)

    def forward(self, x_BSD: Tensor, angles_Sd: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        x_BSD = x_BSD + self.attended(self.norm_1(x_BSD), angles_Sd)
        h_BSD = self.norm_2(x_BSD)
        return x_BSD + self.w2(F.silu(self.w1(h_BSD)) * self.w3(h_BSD))

    def attended(self, x_BSD: Tensor, angles_Sd: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        q_BHSd = rotated(self.heads(self.wq(x_BSD)), angles_Sd)
        k_BKSd = rotated(self.heads(self.wk(x_BSD)), angles_Sd)
        v_BKSd = self.heads(self.wv(x_BSD))
        y_BHSd = F.scaled_dot_product_attention(q_BHSd, k_BKSd, v_BKSd, is_causal=True, enable_gqa=True)
        return self.wo(y_BHSd.transpose(1, 2).flatten(-2))

    def heads(self, x_BSD: Tensor) -> Tensor:
        """[B, S, H * d] -> [B, H, S, d]."""
        return x_BSD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def rotated(x_BHSd: Tensor, angles_Sd: Tensor) -> Tensor:
    """Rotary embedding."""
    left, right = x_BHSd.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return x_BHSd * angles_Sd.cos() + turned * angles_Sd.sin()


class Llama(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self, size: str, num_layers: int) -> None:
        super().__init__()
        width, heads, _, _, vocabulary = SIZES[size]
        self.embedding, self.head = nn.Embedding(vocabulary, width), _linear(width, vocabulary)
        self.layers = nn.ModuleList(Block(size) for _ in range(num_layers))
        self.norm, self.head_dim = nn.RMSNorm(width), width // heads

    def forward(self, ids_BS: Tensor) -> Tensor:
        """[B, S] -> [B, S, V]."""
        x_BSD = self.embedding(ids_BS)
        places_S = torch.arange(ids_BS.shape[1], device=x_BSD.device)
        angles_Sd = places_S[:, None] / torch.logspace(0, 4, self.head_dim, device=x_BSD.device)
        for layer in self.layers:
            x_BSD = layer(x_BSD, angles_Sd)
        return self.head(self.norm(x_BSD))


class Faulty(nn.Module):
    """The same, with a fault after it on the rank `odd`: its calls read the rank."""

    def __init__(self, inner: nn.Module, fault: str, odd: int) -> None:
        super().__init__()
        self.inner, self.fault, self.odd = inner, fault, odd

    def forward(self, ids_BS: Tensor) -> Tensor:
        """[B, S] -> [B, S, V]."""
        x = self.inner(ids_BS)
        if self.fault == "constant":
            x = x * (1.0 + (dist.get_rank() == self.odd))  # fault: constant
        if self.fault == "branch" and dist.get_rank() == self.odd:
            x = x.tanh()  # fault: branch
        if self.fault == "break" and dist.get_rank() == self.odd:
            torch._dynamo.graph_break()  # fault: break
        return x


class Reduced(nn.Module):
    """The same, with its output reduced over a group."""

    def __init__(self, inner: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, ids_BS: Tensor) -> Tensor:
        """[B, S] -> [B, S, V]."""
        return funcol.all_reduce(self.inner(ids_BS), "sum", self.group)  # fault: group


def group_of_output(mesh: DeviceMesh, fault: str, odd: int) -> dist.ProcessGroup:
    """The group over which the output is reduced: rank `odd` takes that of an axis that the others do not take."""
    is_odd = fault == "group" and dist.get_rank() == odd
    return mesh.get_group("dp" if is_odd else "tp")


def make_halves(world_size: int, fault: str, odd: int) -> None:
    """Two groups of half of the ranks, which `odd` makes the other way around."""
    halves = [list(range(world_size // 2)), list(range(world_size // 2, world_size))]
    if fault == "order" and dist.get_rank() == odd:
        halves.reverse()
    for half in halves:
        dist.new_group(half)  # fault: order


def build(ctx: TargetContext) -> tpcompile.Target:
    """Settings: size, layers, fault and odd."""
    settings = ctx.settings
    size, num_layers = settings.get("size", "small"), settings.get("layers", 2)
    fault, odd = settings.get("fault", ""), settings.get("odd", -1)
    rank = dist.get_rank()
    torch.cuda.set_device(rank % 8)
    torch.manual_seed(1234 + rank)
    if rank == 0:
        print(f"{ctx.world_size} ranks of {size}")
    if fault == "layer" and rank == odd:
        num_layers += 1  # fault: layer
    length = 100 if fault == "shape" and rank == odd else 128
    make_halves(ctx.world_size, fault, odd)
    model: nn.Module = Llama(size, num_layers).to(ctx.device)
    for layer in model.layers:
        parallelize_module(layer, ctx.mesh["tp"], PLAN)
    if fault in ("constant", "branch", "break"):
        model = Faulty(model, fault, odd)
    if fault == "group":
        model = Reduced(model, group_of_output(ctx.mesh, fault, odd))
    ids_BS = torch.zeros(1, length, dtype=torch.long, device=ctx.device)
    return tpcompile.Target(program=model, inputs=(ids_BS,))
