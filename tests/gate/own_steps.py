"""Train steps of users whose ranks agree on wrong numbers, for `--target tests.gate.own_steps:NAME`.

`--set wrong=yes` puts the fault in; the line to blame is marked with a comment that names the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

import tpcompile
from tests.gate.own_numbers import PLAN, Gated
from tpcompile.collectives.strategies import Collectives
from tpcompile.target import TargetContext

WIDTH, HIDDEN = 16, 32
Step = Callable[[Any, Any], Any]


class Block(nn.Module):
    """A norm, then gate | up in one weight and their biases, which are zero; a bias behind the sum.

    `head` reads features of this rank, as attention heads do, with a weight that all ranks hold.
    """

    def __init__(self, comm: Collectives, *, is_wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        full = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.comm, self.is_wrong = comm, is_wrong and comm.size > 1
        self.norm = nn.Parameter(torch.linspace(0.5, 2, WIDTH))
        rows = torch.arange(2 * HIDDEN).view(2, comm.size, -1)[:, comm.rank].flatten()
        self.gate_up = nn.Linear(WIDTH, len(rows))
        self.down = nn.Linear(HIDDEN // comm.size, WIDTH)
        with torch.no_grad():
            self.gate_up.weight.copy_(full[0].weight[rows])
            self.gate_up.bias.zero_()
            self.down.weight.copy_(full[1].weight.chunk(comm.size, 1)[comm.rank])
            self.down.bias.copy_(full[1].bias)
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        scale = self.scale if self.is_wrong else self.comm.copy_to_tp(self.scale)
        h = self.gate_up(self.comm.copy_to_tp(F.rms_norm(x, (WIDTH,), self.norm)))
        gate, up = h.chunk(2, -1)
        act = F.silu(gate) * up * scale  # replicated_scale
        return x + self.comm.all_reduce(F.linear(act, self.down.weight)) + self.down.bias


def replicated(name: str) -> bool:
    return name.endswith(("norm", "scale", "down.bias"))  # a compiled module's begin with its prefix


def loss_of(program: Any, x: Tensor) -> Tensor:
    loss: Tensor = program(x).square().mean()
    return loss


def _target(ctx: TargetContext, step: Step, *, is_wrong: bool = False) -> tpcompile.Target:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 2, 6, WIDTH, generator=generator)
    program = Block(Collectives(ctx.mesh.get_group("tp")), is_wrong=is_wrong)
    return tpcompile.Target(program=program, inputs=(x, y), reference=Block(Collectives(None)), step=step)


def _is_wrong(ctx: TargetContext) -> bool:
    return bool(ctx.settings.get("wrong"))


def replicated_scale(ctx: TargetContext) -> tpcompile.Target:
    """The gradient of a replicated weight is not summed; only the optimizer sees it. Fused AdamW, made in the step."""

    def step(program: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2, fused=True)
        loss = loss_of(program, inputs[0])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _target(ctx, step, is_wrong=_is_wrong(ctx))


def clipping(ctx: TargetContext) -> tpcompile.Target:
    """Each rank clips by the norm of its own gradients: foreach SGD with momentum, one optimizer for all calls."""
    is_wrong = _is_wrong(ctx)

    def step(program: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
        if not hasattr(program, "optimizer"):
            program.optimizer = torch.optim.SGD(program.parameters(), lr=0.1, momentum=0.9, foreach=True)
        program.zero_grad()
        loss = loss_of(program, inputs[0])
        loss.backward()
        total = torch.zeros((), dtype=loss.dtype)
        for name, parameter in program.named_parameters():
            share = program.comm.size if replicated(name) else 1
            total = total + parameter.grad.square().sum() / share  # clipping
        if program.comm.size > 1 and not is_wrong:
            dist.all_reduce(total, group=program.comm.group)
        torch.nn.utils.clip_grads_with_norm_(program.parameters(), 0.01, total.sqrt())
        program.optimizer.step()
        return loss.detach()

    return _target(ctx, step)


def accumulated(ctx: TargetContext) -> tpcompile.Target:
    """Two micro-batches, whose mean is divided by the number of ranks as well."""
    is_wrong = _is_wrong(ctx)

    def step(program: Any, inputs: tuple[Tensor, Tensor]) -> None:
        optimizer = torch.optim.Adam(program.parameters(), lr=1e-2, foreach=False)
        for x in inputs:
            loss = loss_of(program, x) * 0.3
            if is_wrong:
                loss = loss / program.comm.size  # accumulated
            loss.backward()
        optimizer.step()

    return _target(ctx, step)


def learning_rate(ctx: TargetContext) -> tpcompile.Target:
    """A step by hand, without an optimizer, whose learning rate is scaled by the ranks."""
    is_wrong = _is_wrong(ctx)

    def step(program: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
        program.zero_grad()
        loss = loss_of(program, inputs[0])
        loss.backward()
        rate = 0.1 * program.comm.size if is_wrong else 0.1
        with torch.no_grad():
            for parameter in program.parameters():
                parameter.add_(parameter.grad, alpha=-rate)  # learning_rate
        return loss.detach()

    return _target(ctx, step)


def stale(ctx: TargetContext) -> tpcompile.Target:
    """Two steps; the second takes the gradient that the first was given."""
    is_wrong = _is_wrong(ctx)

    def step(program: Any, inputs: tuple[Tensor, Tensor]) -> None:
        first: list[Tensor] = []
        for x in inputs:
            grads = torch.autograd.grad(loss_of(program, x), list(program.parameters()))
            first = first or list(grads)
            used = first if is_wrong and program.comm.size > 1 else grads
            with torch.no_grad():
                for parameter, grad in zip(program.parameters(), used, strict=True):
                    parameter.sub_(0.1 * grad)  # stale

    return _target(ctx, step)


class LanguageModel(nn.Module):
    """Rows of a padded vocabulary and heads of this rank; the head is the table, and dropout is that of torch."""

    vocabulary, head = 10, 4

    def __init__(self, comm: Collectives, *, is_wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.comm, self.is_wrong = comm, is_wrong and comm.size > 1
        table, qkv = torch.randn(self.vocabulary, WIDTH), torch.randn(3, WIDTH, WIDTH) / WIDTH**0.5
        table = F.pad(table, (0, 0, 0, 2)) if comm.size > 1 else table  # 12 rows; the reference has none of these
        self.table = nn.Parameter(table.chunk(comm.size)[comm.rank].clone())
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH // comm.size)
        with torch.no_grad():
            self.qkv.weight.copy_(qkv.chunk(comm.size, 1)[comm.rank].flatten(0, 1))
            self.qkv.bias.zero_()
        self.norm = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        """[B, S] -> [B, S, rows of the vocabulary on this rank]."""
        local = ids - self.comm.rank_index(ids.device) * len(self.table)
        is_own = (local >= 0) & (local < len(self.table))
        x = F.embedding(local.clamp(0, len(self.table) - 1), self.table) * is_own.unsqueeze(-1)
        x = F.dropout(self.comm.all_reduce(x), 0.2)
        h = x if self.is_wrong else self.comm.copy_to_tp(x)
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))  # attention
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = F.rms_norm(x + self.comm.all_gather(o, dim=-1, dst="I"), (WIDTH,), self.norm)
        logits: Tensor = F.linear(self.comm.copy_to_tp(x), self.table)
        return logits


def attention(ctx: TargetContext) -> tpcompile.Target:
    """The gradient behind queries, keys and values is not summed. Their biases are zero, and that of the keys has a
    gradient of nothing but rounding, which Adam makes a whole step."""
    dtype = getattr(torch, str(ctx.settings.get("dtype", "float32")))
    ids = torch.randint(0, LanguageModel.vocabulary, (2, 6), generator=torch.Generator().manual_seed(1))

    def step(program: Any, inputs: tuple[Tensor]) -> Tensor:
        optimizer = torch.optim.Adam(program.parameters(), lr=1e-2)
        total = program(*inputs).float().square().sum()
        loss = program.comm.all_reduce(total) / (inputs[0].numel() * WIDTH)
        loss.backward()
        optimizer.step()
        return loss.detach()

    program = LanguageModel(Collectives(ctx.mesh.get_group("tp")), is_wrong=_is_wrong(ctx)).to(dtype)
    reference = LanguageModel(Collectives(None), is_wrong=False).to(dtype)
    return tpcompile.Target(program=program, inputs=(ids,), reference=reference, step=step)


def plan(ctx: TargetContext) -> tpcompile.Target:
    """Weights are DTensors, of which one has its rows in a different order; the wrong one decays only their norms."""
    is_wrong = _is_wrong(ctx)

    def step(program: Any, inputs: tuple[Tensor]) -> Tensor:
        sharded = [each for each in program.parameters() if each.dim() > 1]
        others = [each for each in program.parameters() if each.dim() == 1]
        decay = 0.3 if is_wrong and program.is_parallel else 0.0
        groups = [{"params": sharded}, {"params": others, "weight_decay": decay}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        loss: Tensor = program(*inputs).square().mean()
        loss.backward()
        optimizer.step()  # plan
        return loss.detach()

    program, reference = Gated(), Gated()
    rows = torch.arange(2 * HIDDEN).view(2, ctx.world_size, -1).transpose(0, 1).flatten()
    with torch.no_grad():
        program.gate_up.weight.copy_(program.gate_up.weight[rows].clone())
    program = parallelize_module(program, ctx.mesh["tp"], PLAN)
    program.is_parallel, reference.is_parallel = True, False
    x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    return tpcompile.Target(program=program, inputs=(x,), reference=reference, step=step)


def half(ctx: TargetContext) -> tpcompile.Target:
    """Autocast to bfloat16 of weights in float32; the wrong one does not sum the gradient of a replicated weight."""

    def step(program: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
        optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(program, inputs[0])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _target(ctx, step, is_wrong=_is_wrong(ctx))
