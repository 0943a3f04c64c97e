"""What is right and seldom: layouts, dtypes, randomness, rings, hooks, checkpoints."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .mappings import Copy, Gather, Reduce, Scatter
from .megatron import Base

_GROUP = None


class Uneven(Base):
    """30 features in parts of 8. no_f"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        width = min(-(-30 // self.tp), 30 - self.rank * -(-30 // self.tp))
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16, bias=False)

    def forward(self, x):
        h = x if self.fault == "no_f" else Copy.apply(x, self.group)
        return Reduce.apply(self.down(torch.relu(self.up(h))), self.group)  # <- no_f


class Strided(Base):
    """Experts in turn: rank r has r, r + tp, ... local_number"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.experts = nn.Parameter(torch.randn(8 // self.tp, 16, 16) / 4)
        self.router = nn.Linear(16, 8)

    def forward(self, x):
        weights = Copy.apply(self.router(x).softmax(-1), self.group)
        step = 1 if self.fault == "local_number" else self.tp
        own = weights[:, self.rank :: step][:, : len(self.experts)]  # <- local_number
        y = torch.einsum("td,edf,te->tf", Copy.apply(x, self.group), self.experts, own)  # <- local_number
        return Reduce.apply(y, self.group)


class Dropped(Base):
    """Dropout of sharded and of whole activations. on_summands whole_by_rank"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.up, self.down = nn.Linear(16, 64 // self.tp), nn.Linear(64 // self.tp, 16, bias=False)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.2)

    def forward(self, x):
        h = torch.relu(self.up(Copy.apply(x, self.group)))
        with torch.random.fork_rng():
            torch.manual_seed(17 + self.rank)  # as in the region of Megatron: masks of shards differ
            h = self.inner(h)
            if self.fault == "whole_by_rank":
                return x + self.outer(Reduce.apply(self.down(h), self.group))  # <- whole_by_rank
            y = self.inner(self.down(h)) if self.fault == "on_summands" else self.down(h)  # <- on_summands
        return x + self.outer(Reduce.apply(y, self.group))


class Mixed(Base):
    """Softmax in float32, projections in bfloat16. no_reduce"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.up = nn.Linear(16, 64 // self.tp, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(64 // self.tp, 16, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        h = Copy.apply(x, self.group).to(self.up.weight.dtype)
        y = self.down(F.silu(self.up(h))).float()  # <- no_reduce
        if self.fault != "no_reduce":
            y = Reduce.apply(y, self.group)
        return (x.float() + y).softmax(-1)  # <- no_reduce


class Explicit32(Base):
    """Accumulates in float32 whatever the dtype of the weights. local_sum"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.w = nn.Parameter(torch.randn(64 // self.tp, 16) / 4)
        self.v = nn.Parameter(torch.randn(16, 64 // self.tp) / 4)

    def forward(self, x):
        table = torch.ones(16, dtype=torch.float32)
        h = F.linear(Copy.apply(x, self.group).float() * table, self.w.float()).tanh()
        y = F.linear(h, self.v.float())  # <- local_sum
        return y if self.fault == "local_sum" else Reduce.apply(y, self.group)


class KeyBias(Base):
    """A bias of the keys, whose gradient is zero."""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        width = 32 // self.tp
        self.q, self.k, self.v = nn.Linear(16, width), nn.Linear(16, width), nn.Linear(16, width)
        self.out = nn.Linear(width, 16, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        x = Copy.apply(x, self.group)
        q, k, v = (w(x).view(b, s, -1, 4).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
        return Reduce.apply(self.out(y.transpose(1, 2).reshape(b, s, -1)), self.group)


class Ring(Base):
    """Keys and values go round. one_short"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.qkv = nn.Linear(16, 48, bias=False).requires_grad_(False)

    def passed(self, t):
        if self.tp == 1:
            return t
        got = torch.empty_like(t)
        to, source = (self.rank + 1) % self.tp, (self.rank - 1) % self.tp
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, t, to), dist.P2POp(dist.irecv, got, source)])
        for work in works:
            work.wait()
        return got

    def forward(self, x):  # [B, S, D]
        q, k, v = self.qkv(x.chunk(self.tp, dim=1)[self.rank]).chunk(3, dim=-1)
        kv = torch.cat([k, v], -1).contiguous()
        parts = []
        for _ in range(self.tp - (self.fault == "one_short" and self.tp > 1)):
            k, v = kv.chunk(2, dim=-1)
            scores = q @ k.transpose(-1, -2) / 4
            parts.append((scores.logsumexp(-1, keepdim=True), scores.softmax(-1) @ v))
            kv = self.passed(kv)  # <- one_short
        weights = torch.stack([lse for lse, _ in parts]).softmax(0)  # <- one_short
        y = sum(weight * part for weight, (_, part) in zip(weights, parts, strict=True))  # <- one_short
        pieces = [torch.empty_like(y) for _ in range(self.tp)]
        dist.all_gather(pieces, y.contiguous(), group=self.group)
        return torch.cat(pieces, dim=1)  # <- one_short


class Summed(Base):
    """Sequence-parallel norm whose gradient a hook sums. no_hook"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.weight = nn.Parameter(torch.ones(16))
        if fault != "no_hook":
            self.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=self.group))

    def forward(self, x):
        own = Scatter.apply(x, 1, self.group)
        return Gather.apply(F.rms_norm(own, (16,)) * self.weight, 1, self.group)  # <- no_hook


class Recomputed(Base):
    """Activation checkpoint around the block. double_f"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.up, self.down = nn.Linear(16, 64 // self.tp), nn.Linear(64 // self.tp, 16, bias=False)

    def block(self, x):
        h = Copy.apply(x, self.group)
        if self.fault == "double_f":
            h = Copy.apply(h, self.group)  # <- double_f
        return Reduce.apply(self.down(F.gelu(self.up(h))), self.group)  # <- double_f

    def forward(self, x):
        return x + checkpoint(self.block, x, use_reentrant=False)  # <- double_f


class Global(Base):
    """The group and rank are globals of the file, as in Megatron. no_offset"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        global _GROUP
        _GROUP = self.group
        self.rows = 40 // self.tp
        self.weight = nn.Parameter(torch.randn(self.rows, 16))

    def forward(self, tokens):
        first = 0 if self.fault == "no_offset" else dist.get_rank(_GROUP) * self.rows
        mine = (tokens >= first) & (tokens < first + self.rows)  # <- no_offset
        h = F.embedding((tokens - first) * mine, self.weight) * mine.unsqueeze(-1)  # <- no_offset
        return Reduce.apply(h, _GROUP)  # <- no_offset


class TiedHead(Base):
    """One table of 40 rows, padded, for embedding and logits. padding_kept"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.rows = -(-38 // self.tp)
        self.first = self.rank * self.rows
        self.weight = nn.Parameter(torch.randn(self.rows, 16))

    def forward(self, tokens):
        outside = (tokens < self.first) | (tokens >= self.first + self.rows)
        h = F.embedding((tokens - self.first).masked_fill(outside, 0), self.weight)
        h = Reduce.apply(h.masked_fill(outside.unsqueeze(-1), 0.0), self.group)
        logits = Gather.apply(F.linear(Copy.apply(h, self.group), self.weight), -1, self.group)
        if self.fault == "padding_kept":
            return logits.softmax(-1)[..., :38]  # <- padding_kept
        return logits[..., :38].softmax(-1)


class Cached(Base):
    """A cache of keys as a buffer, drawn when it is built; heads are sharded. local_scale"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.heads = 8 // self.tp
        self.wq = nn.Linear(32, self.heads * 4, bias=False)
        self.wo = nn.Linear(self.heads * 4, 32, bias=False)
        self.register_buffer("cache", torch.randn(2, 2, self.heads, 12, 4))
        self.requires_grad_(False)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.heads, 4).transpose(1, 2)
        width = self.heads if self.fault == "local_scale" else 8
        y = (q @ self.cache[0].transpose(-1, -2) / width**0.5).softmax(-1) @ self.cache[1]  # <- local_scale
        y = self.wo(y.transpose(1, 2).reshape(b, s, -1))
        work = dist.all_reduce(y, group=self.group, async_op=True)
        work.wait()
        return y


class Convolved(Base):
    """Channels are sharded, groups with them. whole_groups"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.inner = nn.Conv1d(16, 32 // self.tp, 3, padding=1)
        self.outer = nn.Conv1d(32 // self.tp, 16, 3, padding=1, bias=False)
        self.groups = 8 // self.tp

    def forward(self, x):
        x = x.transpose(1, 2)
        h = self.inner(Copy.apply(x, self.group))
        groups = self.groups // 2 if self.fault == "whole_groups" and self.tp > 1 else self.groups
        h = F.group_norm(h, groups).relu()  # <- whole_groups
        return Reduce.apply(self.outer(h), self.group).transpose(1, 2)


class ServedMLP(Base):
    """For inference, without a word of it: no copy, and gradients that nobody asks for."""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.up, self.down = nn.Linear(24, 64 // self.tp), nn.Linear(64 // self.tp, 16, bias=False)

    @torch.no_grad()
    def forward(self, x):
        y = self.down(F.gelu(self.up(x)))
        dist.all_reduce(y, group=self.group)
        return y


def build(ctx):
    family, fault = ctx.settings["family"], ctx.settings.get("fault", "")
    module = globals()[family](ctx, fault)
    torch.manual_seed(3)
    if family in ("Global", "TiedHead"):
        return module, (torch.randint(0, 38, (2, 10)),)
    if family == "Strided":
        return module, (torch.randn(12, 16),)
    width = {"Cached": 32, "ServedMLP": 24}.get(family, 16)
    return module, (torch.randn(2, 8, width, requires_grad=family not in ("Ring", "Cached", "ServedMLP")),)
