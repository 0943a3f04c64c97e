"""Megatron style: columns, rows, vocabulary and sequence by autograd Functions."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .mappings import Copy, Gather, GatherSequence, Reduce, ReduceScatterSequence, Scatter


class Base(nn.Module):
    def __init__(self, ctx, fault):
        super().__init__()
        self.group, self.fault = ctx.mesh["tp"].get_group(), fault
        self.tp, self.rank = ctx.world_size, ctx.rank


class MLP(Base):
    """no_f bias_inside no_g residual_inside double_g"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.up = nn.Linear(16, 64 // self.tp)
        self.down = nn.Linear(64 // self.tp, 16, bias=False)
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        h = x if self.fault == "no_f" else Copy.apply(x, self.group)  # <- no_f
        h = F.gelu(self.up(h))  # <- no_f
        y = self.down(h)  # <- bias_inside <- no_g <- residual_inside
        if self.fault == "bias_inside":
            return x + Reduce.apply(y + self.bias, self.group)  # <- bias_inside
        if self.fault == "no_g":
            return x + y + self.bias  # <- no_g
        if self.fault == "residual_inside":
            return Reduce.apply(y + x, self.group) + self.bias  # <- residual_inside
        y = Reduce.apply(y, self.group)
        if self.fault == "double_g":
            y = Reduce.apply(y, self.group)  # <- double_g
        return x + y + self.bias


class Attention(Base):
    """local_norm no_f gather_dim"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.heads, self.head_dim = 8 // self.tp, 4
        self.qkv = nn.Linear(32, 3 * self.heads * self.head_dim)
        self.norm_weight = nn.Parameter(torch.ones(self.head_dim))
        self.proj = nn.Linear(self.heads * self.head_dim, 32, bias=False)
        self.proj_bias = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        b, s, _ = x.shape
        h = x if self.fault == "no_f" else Copy.apply(x, self.group)
        qkv = self.qkv(h)  # <- no_f
        q, k, v = qkv.view(b, s, self.heads, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        weight = self.norm_weight if self.fault == "local_norm" else Copy.apply(self.norm_weight, self.group)
        q = F.rms_norm(q, (self.head_dim,)) * weight  # <- local_norm
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        return Reduce.apply(self.proj(y), self.group) + self.proj_bias


class VocabEmbedding(Base):
    """no_offset no_mask both_ends"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.rows = 48 // self.tp
        self.first = self.rank * self.rows
        self.weight = nn.Parameter(torch.randn(self.rows, 16))

    def forward(self, tokens):
        last = self.first + self.rows
        outside = (tokens < self.first) | (tokens >= last)  # <- both_ends
        if self.fault == "both_ends":
            outside = (tokens <= self.first) | (tokens >= last)  # <- both_ends
        if self.fault == "no_offset":
            local = tokens.masked_fill(outside, 0).clamp(max=self.rows - 1)  # <- no_offset
        else:
            local = (tokens - self.first).masked_fill(outside, 0)  # <- both_ends
        h = F.embedding(local, self.weight)  # <- no_mask <- no_offset
        if self.fault != "no_mask":
            h = h.masked_fill(outside.unsqueeze(-1), 0.0)  # <- both_ends <- no_offset
        return Reduce.apply(h, self.group)  # <- no_mask <- no_offset <- both_ends


class CrossEntropy(Base):
    """local_max local_sum no_offset"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.rows = 48 // self.tp
        self.head = nn.Linear(16, self.rows, bias=False)

    def forward(self, x, target):
        logits = self.head(Copy.apply(x, self.group))
        top = logits.detach().amax(-1, keepdim=True)  # <- local_max
        if self.fault != "local_max":
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        logits = logits - top  # <- local_max
        total = logits.exp().sum(-1)  # <- local_sum <- local_max
        if self.fault != "local_sum":
            total = Reduce.apply(total, self.group)  # <- local_max
        first = 0 if self.fault == "no_offset" else self.rank * self.rows
        local = target - first
        mine = (local >= 0) & (local < self.rows)  # <- no_offset
        found = logits.gather(-1, local.clamp(0, self.rows - 1).unsqueeze(-1)).squeeze(-1) * mine  # <- no_offset
        found = Reduce.apply(found, self.group)  # <- no_offset <- local_max
        return (total.log() - found).mean()  # <- local_sum <- local_max


class SequenceBlock(Base):
    """gather_slices norm_weight scatter_first exit_all_reduce"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.norm_weight = nn.Parameter(torch.ones(16))
        self.up = nn.Linear(16, 64 // self.tp)
        self.down = nn.Linear(64 // self.tp, 16, bias=False)

    def forward(self, x):  # [S, B, D]
        tokens = Scatter.apply(x, 0, self.group)
        weight = self.norm_weight if self.fault == "norm_weight" else Copy.apply(self.norm_weight, self.group)
        h = F.layer_norm(tokens, (16,)) * weight  # <- norm_weight
        if self.fault == "gather_slices":
            h = Gather.apply(h, 0, self.group)  # <- gather_slices
        else:
            h = GatherSequence.apply(h, self.group)
        h = self.down(F.gelu(self.up(h)))  # <- gather_slices <- scatter_first
        if self.fault == "scatter_first":
            return x + Gather.apply(Scatter.apply(h, 0, self.group), 0, self.group)  # <- scatter_first
        tokens = tokens + ReduceScatterSequence.apply(h, self.group)
        return Gather.apply(tokens, 0, self.group)


class ColumnGather(Base):
    """wrong_dim no_f"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.weight = nn.Parameter(torch.randn(32 // self.tp, 16) / 4)

    def forward(self, x):
        h = x if self.fault == "no_f" else Copy.apply(x, self.group)
        y = F.linear(h, self.weight)  # <- no_f
        if self.fault == "wrong_dim":
            y = Gather.apply(y, 0, self.group).view(*x.shape[:-1], -1)  # <- wrong_dim
        else:
            y = Gather.apply(y, -1, self.group)
        return torch.tanh(y)


class FullWidthNorm(Base):
    """local_mean divided_locally unsummed_gradient"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.up = nn.Linear(16, 64 // self.tp)
        self.scale = nn.Parameter(torch.ones(64 // self.tp))
        self.down = nn.Linear(64 // self.tp, 16, bias=False)

    def forward(self, x):
        h = self.up(Copy.apply(x, self.group))
        squares = h.square().sum(-1, keepdim=True)  # <- local_mean
        if self.fault == "local_mean":
            mean = squares / h.shape[-1]  # <- local_mean
        else:
            both = Reduce if self.fault == "unsummed_gradient" else _Both
            width = h.shape[-1] if self.fault == "divided_locally" else 64
            mean = both.apply(squares, self.group) / width  # <- divided_locally <- unsummed_gradient
        h = h * torch.rsqrt(mean + 1e-6) * self.scale  # <- local_mean <- divided_locally <- unsummed_gradient
        return Reduce.apply(self.down(h), self.group)


class _Both(torch.autograd.Function):
    """Sums the value, and the gradients of its consumers, which differ per rank."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return Reduce.forward(ctx, x, group)

    @staticmethod
    def backward(ctx, grad):
        return Reduce.forward(ctx, grad, ctx.group), None


class Alibi(Base):
    """local_slopes"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.heads = 8 // self.tp
        self.qkv = nn.Linear(32, 3 * self.heads * 4, bias=False)
        self.out = nn.Linear(self.heads * 4, 32, bias=False)
        first = 0 if fault == "local_slopes" else self.rank * self.heads
        slopes = [2 ** -(head + 1.0) for head in range(first, first + self.heads)]  # <- local_slopes
        self.slopes = torch.tensor(slopes).view(1, -1, 1, 1)  # <- local_slopes

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(Copy.apply(x, self.group)).view(b, s, self.heads, 3, 4).permute(3, 0, 2, 1, 4)
        places = torch.arange(s)
        bias = -(places[:, None] - places).abs() * self.slopes  # <- local_slopes
        weights = (q @ k.transpose(-1, -2) / math.sqrt(4) + bias).softmax(-1)  # <- local_slopes
        return Reduce.apply(self.out((weights @ v).transpose(1, 2).reshape(b, s, -1)), self.group)


def build(ctx):
    family, fault = ctx.settings["family"], ctx.settings.get("fault", "")
    module = globals()[family](ctx, fault)
    torch.manual_seed(3)
    if family == "VocabEmbedding":
        return module, (torch.randint(0, 48, (2, 10)),)
    if family == "CrossEntropy":
        return module, (torch.randn(2, 6, 16), torch.randint(0, 48, (2, 6)))
    if family == "SequenceBlock":
        return module, (torch.randn(8, 2, 16),)
    width = 32 if family in ("Attention", "Alibi") else 16
    return module, (torch.randn(2, 8, width, requires_grad=True),)
