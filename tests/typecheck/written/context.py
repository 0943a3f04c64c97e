"""A sequence in parts, DTensors, and the collectives of torch that have gradients."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tpcompile.collectives import all_gather_single, all_reduce, copy_to_tp, scatter_single

from .mappings import Copy, Exchange, Gather, GatherSequence, Reduce, Scatter
from .megatron import Base


class Rotary(Base):
    """Attention of a part of the sequence to gathered keys. local_rotary local_mask gather_cut"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.qkv = nn.Linear(16, 3 * 16, bias=False)
        self.out = nn.Linear(16, 16, bias=False)

    def rotated(self, x, places):
        angles = places[:, None] / 10 ** (torch.arange(2) / 2)
        one, two = x.chunk(2, dim=-1)
        return torch.cat([one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1)

    def forward(self, x):  # [S, B, D]
        own = Scatter.apply(x, 0, self.group)
        s, b, _ = own.shape
        weight = Copy.apply(self.qkv.weight, self.group)
        q, k, v = F.linear(own, weight).view(s, b, 3, 4, 4).permute(2, 1, 3, 0, 4)
        first = 0 if self.fault == "local_rotary" else self.rank * s
        places = torch.arange(first, first + s)  # <- local_rotary
        q, k = self.rotated(q, places), self.rotated(k, places)  # <- local_rotary
        gather = Gather if self.fault == "gather_cut" else None
        k, v = (self.gathered(t, gather) for t in (k, v))
        first = 0 if self.fault == "local_mask" else self.rank * s
        mask = torch.arange(first, first + s)[:, None] >= torch.arange(s * self.tp)  # <- local_mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # <- local_mask <- local_rotary <- gather_cut
        y = F.linear(y.permute(2, 0, 1, 3).reshape(s, b, -1), Copy.apply(self.out.weight, self.group))
        return Gather.apply(y, 0, self.group)

    def gathered(self, t, gather):
        t = t.permute(2, 0, 1, 3)
        whole = gather.apply(t, 0, self.group) if gather else GatherSequence.apply(t, self.group)  # <- gather_cut
        return whole.permute(1, 2, 0, 3)


class Ulysses(Base):
    """swapped not_back"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.qkv = nn.Linear(32, 96, bias=False)
        self.out = nn.Linear(32, 32, bias=False)

    def forward(self, x):  # [B, S, D]
        own = Scatter.apply(x, 1, self.group)
        b, s, _ = own.shape
        q, k, v = F.linear(own, Copy.apply(self.qkv.weight, self.group)).view(b, s, 3, 8, 4).unbind(2)
        q, k, v = (Exchange.apply(t, 2, 1, self.group) for t in (q, k, v))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
        if self.fault == "swapped":
            s_all = y.shape[1]
            y = y.reshape(b, self.tp, s_all // self.tp, -1, 4).transpose(1, 2).reshape(y.shape)  # <- swapped
        y = Exchange.apply(y, 1, 2, self.group).reshape(b, s, -1)  # <- swapped
        y = F.linear(y, Copy.apply(self.out.weight, self.group))  # <- swapped
        return Gather.apply(y, 1, self.group)


class DTensorPlan(Base):
    """row_as_column"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        up, down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
        self.net = nn.Sequential(up, nn.GELU(), down)
        row = RowwiseParallel(output_layouts=Shard(-1)) if fault == "row_as_column" else RowwiseParallel()
        parallelize_module(self.net, ctx.mesh["tp"], {"0": ColwiseParallel(), "2": row})

    def forward(self, x):
        return self.net(x).square()  # <- row_as_column


class DTensorEdges(Base):
    """partial_left replicate_in gradient_left"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.mesh = ctx.mesh["tp"]
        self.w_in = nn.Parameter(torch.randn(64 // self.tp, 16) / 4)
        self.w_out = nn.Parameter(torch.randn(16, 64 // self.tp) / 4)

    def forward(self, x):
        grads = [Replicate()] if self.fault == "gradient_left" else [Partial()]
        h = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=grads)
        h = F.gelu(F.linear(h, self.w_in))  # <- gradient_left
        y = F.linear(h, self.w_out)  # <- partial_left <- replicate_in
        placed = [Replicate()] if self.fault == "replicate_in" else [Partial()]
        y = DTensor.from_local(y, self.mesh, placed, run_check=False)  # <- replicate_in
        if self.fault == "partial_left":
            return x + y.to_local()  # <- partial_left
        return x + y.redistribute(placements=[Replicate()]).to_local()  # <- replicate_in


class Functional(Base):
    """torch's functional all_reduce sums the gradient as well. row_output"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.up = nn.Linear(16, 64 // self.tp, bias=False)
        self.down = nn.Linear(64 // self.tp, 16, bias=False)

    def forward(self, x):
        h = self.up(Copy.apply(x, self.group))
        squares = funcol.all_reduce(h.square().sum(-1, keepdim=True), "sum", self.group)
        y = self.down(h * torch.rsqrt(squares / 64 + 1e-6))
        if self.fault == "row_output":
            return funcol.all_reduce(y, "sum", self.group) + x  # <- row_output
        return Reduce.apply(y, self.group) + x


class MergedAttention(Base):
    """Parts of the keys per rank, merged by their log-sum-exp. unweighted mean"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.wq, self.wkv = nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False)

    def forward(self, x):
        x = copy_to_tp(x, group=self.group)
        q, kv = F.linear(x, self.whole(self.wq)), F.linear(x, self.whole(self.wkv))
        k, v = kv.chunk(self.tp, dim=1)[self.rank].chunk(2, dim=-1)
        scores = q @ k.transpose(-1, -2) / 4
        y = scores.softmax(-1) @ v  # <- unweighted
        if self.fault == "unweighted":
            return all_reduce(y, group=self.group, dst="I", op="avg")  # <- unweighted
        lse = scores.logsumexp(-1, keepdim=True)
        top = lse.detach().clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        weight = (lse - top).exp()
        both = all_reduce(torch.cat([y * weight, weight], -1), group=self.group, dst="I")
        return both[..., :-1] / both[..., -1:]

    def whole(self, linear):
        return copy_to_tp(linear.weight, group=self.group)


class LowRank(Base):
    """no_copy adapter_outside"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.up = nn.Linear(16, 64 // self.tp, bias=False)
        self.a = nn.Linear(16, 4, bias=False)
        self.b = nn.Linear(4, 64 // self.tp, bias=False)
        self.down = nn.Linear(64 // self.tp, 16, bias=False)

    def forward(self, x):
        x = copy_to_tp(x, group=self.group)
        weight = self.a.weight if self.fault == "no_copy" else copy_to_tp(self.a.weight, group=self.group)
        h = self.up(x) + self.b(F.linear(x, weight))  # <- no_copy
        return all_reduce(self.down(torch.tanh(h)), group=self.group, dst="I")


class HiddenEmbedding(Base):
    """Columns of the embedding per rank. wrong_dim"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.table = nn.Embedding(48, 32 // self.tp)
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens):
        h = self.table(tokens)
        if self.fault == "wrong_dim":
            h = all_gather_single(h, dim=1, group=self.group, dst="I").view(*tokens.shape, -1)  # <- wrong_dim
        else:
            h = all_gather_single(h, dim=-1, group=self.group, dst="I")
        return self.norm(h)  # <- wrong_dim


class Positions(Base):
    """Learned positions of a part of the sequence. from_zero"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.table = nn.Parameter(torch.randn(8, 16))

    def forward(self, x):  # [S, B, D]
        own = scatter_single(x, dim=0, group=self.group, src="I")
        first = 0 if self.fault == "from_zero" else self.rank * own.shape[0]
        table = copy_to_tp(self.table, group=self.group)
        own = own + table[first : first + own.shape[0], None]  # <- from_zero
        return all_gather_single(own, dim=0, group=self.group, dst="I")


class Balance(Base):
    """A loss of products of means over tokens that are spread. local_product"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.router = nn.Linear(16, 8, bias=False)

    def forward(self, x):  # [T, D]
        own = Scatter.apply(x, 0, self.group)
        probs = F.linear(own, Copy.apply(self.router.weight, self.group)).softmax(-1)
        share = F.one_hot(probs.argmax(-1), 8).to(probs.dtype).mean(0)
        mean = probs.mean(0)  # <- local_product
        if self.fault == "local_product":
            return Reduce.apply((share * mean).sum() / self.tp, self.group)  # <- local_product
        dist.all_reduce(share, group=self.group)
        mean = Reduce.apply(mean / self.tp, self.group)
        return (share / self.tp * mean).sum()


def build(ctx):
    family, fault = ctx.settings["family"], ctx.settings.get("fault", "")
    module = globals()[family](ctx, fault)
    torch.manual_seed(3)
    if family == "HiddenEmbedding":
        return module, (torch.randint(0, 48, (2, 8)),)
    if family == "Balance":
        return module, (torch.randn(32, 16),)
    if family in ("Rotary", "Positions"):
        return module, (torch.randn(8, 2, 16, requires_grad=True),)
    width = 32 if family == "Ulysses" else 16
    return module, (torch.randn(2, 8, width, requires_grad=family not in ("MergedAttention",)),)
