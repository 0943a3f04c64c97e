"""vLLM and gpt-fast style: no gradients, plain collectives, heads and experts by rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .megatron import Base


def _summed(x, group):
    dist.all_reduce(x, group=group)
    return x


class GateUp(Base):
    """no_reduce twice slice_of_one"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.gate_up = nn.Linear(16, 2 * 64 // self.tp, bias=False)
        self.down = nn.Linear(64 // self.tp, 16, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y = self.down(F.silu(gate) * up)  # <- no_reduce
        if self.fault != "no_reduce":
            _summed(y, self.group)
        if self.fault == "twice":
            _summed(y, self.group)  # <- twice
        return x + y  # <- no_reduce


class GroupedHeads(Base):
    """own_kv_zero"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.heads, self.kv_heads = 8 // self.tp, max(1, 2 // self.tp)
        self.wq = nn.Linear(32, self.heads * 4, bias=False)
        self.wkv = nn.Linear(32, 2 * 2 * 4, bias=False)  # both kv heads on all ranks
        self.wo = nn.Linear(self.heads * 4, 32, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.heads, 4).transpose(1, 2)
        k, v = self.wkv(x).view(b, s, 2, 2, 4).permute(2, 0, 3, 1, 4)
        heads = torch.arange(self.rank * self.heads, (self.rank + 1) * self.heads) // 4
        if self.fault == "own_kv_zero":
            heads = torch.arange(self.heads) // 4  # <- own_kv_zero
        k, v = k[:, heads], v[:, heads]  # <- own_kv_zero
        y = F.scaled_dot_product_attention(q, k, v)  # <- own_kv_zero
        return _summed(self.wo(y.transpose(1, 2).reshape(b, s, -1)), self.group)


class SharedKeyHeads(Base):
    """no_reduce"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.heads, self.kv_heads = 8 // self.tp, max(1, 2 // self.tp)
        self.wq = nn.Linear(32, self.heads * 4, bias=False)
        self.wk = nn.Linear(32, self.kv_heads * 4, bias=False)
        self.wv = nn.Linear(32, self.kv_heads * 4, bias=False)
        self.wo = nn.Linear(self.heads * 4, 32, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, 4).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.wo(y.transpose(1, 2).reshape(b, s, -1))  # <- no_reduce
        return y if self.fault == "no_reduce" else _summed(y, self.group)


class PackedKeyHeads(Base):
    """The same with q, k and v in one parameter. no_reduce"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.heads, self.kv_heads = 8 // self.tp, max(1, 2 // self.tp)
        self.qkv = nn.Linear(32, (self.heads + 2 * self.kv_heads) * 4, bias=False)
        self.wo = nn.Linear(self.heads * 4, 32, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        packed = self.qkv(x).split([self.heads * 4, self.kv_heads * 4, self.kv_heads * 4], dim=-1)
        q, k, v = (t.view(b, s, -1, 4).transpose(1, 2) for t in packed)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        y = self.wo(y.transpose(1, 2).reshape(b, s, -1))  # <- no_reduce
        return y if self.fault == "no_reduce" else _summed(y, self.group)


class GreedyHead(Base):
    """no_offset local_choice wrong_dim"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.rows = 48 // self.tp
        self.head = nn.Linear(16, self.rows, bias=False)

    def forward(self, x):
        logits = self.head(x)
        value, index = logits.max(-1)  # <- local_choice <- no_offset
        if self.fault == "local_choice":
            return F.one_hot(index, 48).to(x.dtype)  # <- local_choice
        if self.fault != "no_offset":
            index = index + self.rank * self.rows
        values = [torch.empty_like(value) for _ in range(self.tp)]
        indices = [torch.empty_like(index) for _ in range(self.tp)]
        dist.all_gather(values, value, group=self.group)
        dist.all_gather(indices, index, group=self.group)  # <- no_offset
        best = torch.stack(values).argmax(0, keepdim=True)
        chosen = torch.stack(indices).gather(0, best).squeeze(0)  # <- no_offset
        return F.one_hot(chosen, 48).to(x.dtype)  # <- no_offset


class LogitsHead(Base):
    """wrong_dim reversed"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.head = nn.Linear(16, 56 // self.tp, bias=False)

    def forward(self, x):
        logits = self.head(x)
        pieces = [torch.empty_like(logits) for _ in range(self.tp)]
        dist.all_gather(pieces, logits, group=self.group)
        if self.fault == "wrong_dim":
            whole = torch.cat(pieces, dim=0).view(*x.shape[:-1], -1)  # <- wrong_dim
        else:
            order = reversed(pieces) if self.fault == "reversed" else pieces
            whole = torch.cat(list(order), dim=-1)  # <- reversed
        return whole[..., :50].softmax(-1)  # <- reversed <- wrong_dim


class Experts(Base):
    """same_experts shared_inside no_reduce local_top"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.local = 8 // self.tp
        self.router = nn.Linear(16, 8, bias=False)
        self.w1 = nn.Parameter(torch.randn(self.local, 16, 24) / 4)
        self.w2 = nn.Parameter(torch.randn(self.local, 24, 16) / 4)
        self.shared = nn.Linear(16, 16, bias=False)

    def forward(self, x):  # [T, D]
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for number in range(self.local):
            expert = number if self.fault == "same_experts" else number + self.rank * self.local
            weight = (weights * (chosen == expert)).sum(-1, keepdim=True)  # <- same_experts
            y = y + weight * (F.silu(x @ self.w1[number]) @ self.w2[number])  # <- same_experts <- no_reduce
        if self.fault == "shared_inside":
            return _summed(y + self.shared(x), self.group)  # <- shared_inside
        if self.fault != "no_reduce":
            y = _summed(y, self.group)  # <- same_experts
        return y + self.shared(x)  # <- no_reduce


class Dispatch(Base):
    """Tokens of all ranks by all-to-all to the rank of their expert. not_returned"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.w = nn.Parameter(torch.randn(8 // self.tp, 16, 16) / 4)

    def forward(self, x):  # [T, D], expert t % 8 for token t
        mine = x.chunk(self.tp)[self.rank]
        blocks = mine.view(-1, 8, 16).transpose(0, 1).contiguous()  # expert, tokens
        got = torch.empty_like(blocks)
        dist.all_to_all_single(got, blocks, group=self.group)
        got = got.view(self.tp, 8 // self.tp, -1, 16).transpose(0, 1)
        y = torch.relu(torch.einsum("ertd,edf->ertf", got, self.w))
        back = y.transpose(0, 1).reshape(8, -1, 16).contiguous()
        if self.fault != "not_returned":
            out = torch.empty_like(back)
            dist.all_to_all_single(out, back, group=self.group)
            back = out
        back = back.transpose(0, 1).reshape(mine.shape)
        whole = back.new_empty(x.shape)
        dist.all_gather_into_tensor(whole, back.contiguous(), group=self.group)  # <- not_returned
        return whole  # <- not_returned


class HookedFeedForward(Base):
    """gpt-fast: a forward hook sums what the last linear returns. no_hook both"""

    def __init__(self, ctx, fault):
        super().__init__(ctx, fault)
        self.w1 = nn.Linear(16, 64 // self.tp, bias=False)
        self.w2 = nn.Linear(64 // self.tp, 16, bias=False)
        if fault != "no_hook":
            self.w2.register_forward_hook(lambda module, args, out: _summed(out, self.group))

    def forward(self, x):
        y = self.w2(F.silu(self.w1(x)))  # <- no_hook
        if self.fault == "both":
            y = _summed(y, self.group)  # <- both
        return x + y  # <- no_hook


def build(ctx):
    family, fault = ctx.settings["family"], ctx.settings.get("fault", "")
    module = globals()[family](ctx, fault).requires_grad_(False)
    torch.manual_seed(3)
    if family in ("Experts", "Dispatch"):
        return module, (torch.randn(32, 16),)
    width = 32 if family in ("GroupedHeads", "SharedKeyHeads", "PackedKeyHeads") else 16
    return module, (torch.randn(2, 8, width),)
