"""Programs of users whose ranks agree on wrong numbers, for `--target tests.gate.own_numbers:NAME`.

`--set wrong=yes` puts the fault in; the line to blame is marked with a comment that names the program.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpcompile
from tpcompile.collectives.strategies import Collectives
from tpcompile.target import TargetContext

WIDTH, HIDDEN, NUM_EXPERTS = 16, 32, 8


class Gated(nn.Module):
    """A norm, then an MLP with gate and up in one weight, as published checkpoints have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(WIDTH)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        with torch.no_grad():
            self.norm.weight.copy_(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)  # gate_up
        return x + self.down(F.silu(gate) * up)


PLAN = {"gate_up": ColwiseParallel(), "down": RowwiseParallel()}


def gate_up(ctx: TargetContext) -> tpcompile.Target:
    """The fused weight under a plan, which cuts it as one matrix; right where its rows were put in order before."""
    model = Gated()
    if not _is_wrong(ctx):
        rows = torch.arange(2 * HIDDEN).view(2, ctx.world_size, -1).transpose(0, 1).flatten()
        with torch.no_grad():
            model.gate_up.weight.copy_(model.gate_up.weight[rows].clone())
    program = parallelize_module(model, ctx.mesh["tp"], PLAN)
    return tpcompile.Target(program=program, inputs=_inputs(), reference=Gated())


class Sharded(nn.Module):
    """The same without gate, its weights plain shards of this rank."""

    def __init__(self, comm: Collectives) -> None:
        super().__init__()
        full = Gated()
        self.comm, self.norm = comm, full.norm
        up, down = full.gate_up.weight.detach()[:HIDDEN], full.down.weight.detach()
        self.up = nn.Parameter(up.chunk(comm.size)[comm.rank].clone())
        self.down = nn.Parameter(down.chunk(comm.size, 1)[comm.rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        h = F.linear(self.comm.copy_to_tp(self.norm(x)), self.up)
        return x + self.comm.all_reduce(F.linear(F.silu(h), self.down))


def gradient_norm(ctx: TargetContext) -> tpcompile.Target:
    """A train step that returns the norm of the gradients; the wrong one counts replicated ones on every rank."""
    is_wrong = _is_wrong(ctx)

    def step(program: Any, inputs: tuple[Tensor]) -> dict[str, Any]:
        loss = program(*inputs).square().mean()
        loss.backward()
        comm = program.comm
        total = torch.zeros(())
        for name, parameter in program.named_parameters():
            square = parameter.grad.square().sum()
            if comm.size > 1 and "norm" in name and not is_wrong:
                square = square / comm.size
            total = total + square  # gradient_norm
            parameter.grad = None
        if comm.size > 1:
            dist.all_reduce(total, group=comm.group)
        return {"loss": loss, "gradient norm": total.sqrt()}

    comm = Collectives(ctx.mesh.get_group("tp"))
    return tpcompile.Target(
        program=Sharded(comm), inputs=_inputs(), reference=Sharded(Collectives(None)), step=step
    )  # fmt: skip


def norm_of_a_plan(ctx: TargetContext) -> tpcompile.Target:
    """The same of a model under a plan, by local gradients and as a number."""
    is_wrong = _is_wrong(ctx)

    def step(program: Any, inputs: tuple[Tensor]) -> dict[str, Any]:
        program.zero_grad()
        loss = program(*inputs).square().mean()
        loss.backward()
        norms = []
        for parameter in program.parameters():
            grad = parameter.grad
            is_sharded = isinstance(grad, DTensor)
            local = grad.to_local() if is_sharded else grad
            share = 1 if is_sharded or is_wrong or program.is_alone else ctx.world_size
            norms.append(torch.linalg.vector_norm(local) / share**0.5)
        total = torch.stack(norms).square().sum()  # norm_of_a_plan
        if not program.is_alone:
            dist.all_reduce(total)
        return {"loss": loss, "gradient norm": total.sqrt().item()}

    program, reference = Gated(), Gated()
    rows = torch.arange(2 * HIDDEN).view(2, ctx.world_size, -1).transpose(0, 1).flatten()
    with torch.no_grad():
        program.gate_up.weight.copy_(program.gate_up.weight[rows].clone())
    program = parallelize_module(program, ctx.mesh["tp"], PLAN)
    program.is_alone, reference.is_alone = False, True
    return tpcompile.Target(program=program, inputs=_inputs(), reference=reference, step=step)


class Merged(nn.Module):
    """An adapter of low rank, merged into the weight that it adapts: nothing of it is seen by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return F.linear(x, self.base.weight + 2.0 * self.up.weight @ self.down.weight, self.base.bias).tanh()


class Adapted(nn.Module):
    """The same with the adapter beside it, its rank over the ranks; the wrong one scales it by its own part of that."""

    def __init__(self, comm: Collectives, *, is_wrong: bool) -> None:
        super().__init__()
        full = Merged()
        self.comm, self.base = comm, full.base
        self.down = nn.Parameter(full.down.weight.detach().chunk(comm.size)[comm.rank].clone())
        self.up = nn.Parameter(full.up.weight.detach().chunk(comm.size, 1)[comm.rank].clone())
        self.scale = 2.0 * HIDDEN / (len(self.down) if is_wrong else HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        comm = self.collectives()
        low = F.linear(comm.copy_to_tp(x), self.down)
        delta = comm.all_reduce(F.linear(low, self.up))
        return torch.tanh(self.base(x) + delta * self.scale)  # adapter

    def collectives(self) -> Collectives:
        """Of the ranks."""
        return self.comm


def adapter(ctx: TargetContext) -> tpcompile.Target:
    """A reference with other ops; `--set ranks=two` is a build that cannot be made for one rank."""
    if ctx.settings.get("ranks") == "two" and ctx.world_size == 1:
        raise ValueError("two ranks at least")
    program = Adapted(Collectives(ctx.mesh.get_group("tp")), is_wrong=_is_wrong(ctx))
    return tpcompile.Target(program=program, inputs=_inputs(), reference=Merged())


_OF_PROCESS: list[Collectives] = []


class AdaptedInProcess(Adapted):
    """The same, with the group in a global name."""

    def collectives(self) -> Collectives:
        """What the last build has set."""
        return _OF_PROCESS[0]


def global_group(ctx: TargetContext) -> tpcompile.Target:
    """Each build sets the group of the process anew."""
    _OF_PROCESS[:] = [Collectives(ctx.mesh.get_group("tp"))]
    program = AdaptedInProcess(_OF_PROCESS[0], is_wrong=_is_wrong(ctx))
    return tpcompile.Target(program=program, inputs=_inputs(), reference=Merged())


class Named(Adapted):
    """The same, with the name of the group, which is a different one on each rank that is alone."""

    def __init__(self, comm: Collectives, group: str, *, is_wrong: bool) -> None:
        super().__init__(comm, is_wrong=is_wrong)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        delta = funcol.all_reduce(F.linear(F.linear(x, self.down), self.up), "sum", self.group)
        return torch.tanh(self.base(x) + delta * self.scale)  # named_group


def named_group(ctx: TargetContext) -> tpcompile.Target:
    """Ranks pass names to the module, which the search for one rank passes again, and differently."""
    group = ctx.mesh.get_group("tp")
    program = Named(Collectives(group), group.group_name, is_wrong=_is_wrong(ctx)).requires_grad_(False)
    return tpcompile.Target(program=program, inputs=_inputs(), reference=Merged())


class Experts(nn.Module):
    """A gate of each of 8 experts, which scales its own product; the ranks have them in turn."""

    def __init__(self, comm: Collectives, *, is_wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        count = NUM_EXPERTS // comm.size
        self.comm = comm
        self.router = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH))
        self.experts = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH).chunk(comm.size)[comm.rank].clone())
        first = comm.rank if is_wrong else comm.rank * count
        self.register_buffer("numbers", first + torch.arange(count))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        x = self.comm.copy_to_tp(x)
        shares = F.linear(x, self.comm.copy_to_tp(self.router)).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in zip(self.numbers, self.experts, strict=True):  # experts
            out = out + shares.index_select(-1, number.view(1)) * F.linear(x, expert)
        return self.comm.all_reduce(out)


def experts(ctx: TargetContext) -> tpcompile.Target:
    """The wrong numbers of a rank's experts are those of others: what each is looked up by is right by itself."""
    program = Experts(Collectives(ctx.mesh.get_group("tp")), is_wrong=_is_wrong(ctx))
    return tpcompile.Target(program=program, inputs=_inputs(), reference=Experts(Collectives(None), is_wrong=False))


def heads_in_turn(ctx: TargetContext) -> tpcompile.Target:
    """Hidden units that are scaled; the ranks have the wrong scales in turn, and all else in their order."""

    class Scaled(Sharded):
        def __init__(self, comm: Collectives) -> None:
            super().__init__(comm)
            scale = torch.linspace(0.5, 2, HIDDEN)
            own = scale[comm.rank :: comm.size] if _is_wrong(ctx) else scale.chunk(comm.size)[comm.rank]
            self.scale = nn.Parameter(own.clone())

        def forward(self, x: Tensor) -> Tensor:
            """[B, S, D] -> [B, S, D]."""
            h = F.silu(F.linear(self.comm.copy_to_tp(self.norm(x)), self.up))
            return x + self.comm.all_reduce(F.linear(h * self.scale, self.down))  # heads_in_turn

    program = Scaled(Collectives(ctx.mesh.get_group("tp")))
    return tpcompile.Target(program=program, inputs=_inputs(), reference=Scaled(Collectives(None)))


def flat_table(ctx: TargetContext) -> tpcompile.Target:
    """A table of scales by token and hidden unit; the wrong one is cut as flat memory, not by its columns."""

    class Table(Sharded):
        def __init__(self, comm: Collectives) -> None:
            super().__init__(comm)
            scale = torch.rand(6, HIDDEN, generator=torch.Generator().manual_seed(3)) + 0.5
            parts = scale.view(comm.size, 6, -1) if _is_wrong(ctx) else scale.chunk(comm.size, 1)
            self.scale = nn.Parameter(parts[comm.rank].clone())

        def forward(self, x: Tensor) -> Tensor:
            """[B, S, D] -> [B, S, D]."""
            h = F.silu(F.linear(self.comm.copy_to_tp(self.norm(x)), self.up)) * self.scale  # flat_table
            return x + self.comm.all_reduce(F.linear(h, self.down))

    program = Table(Collectives(ctx.mesh.get_group("tp")))
    return tpcompile.Target(program=program, inputs=_inputs(), reference=Table(Collectives(None)))


class OnMesh(Sharded):
    """Samples over the axis dp, hidden units over tp; the wrong one sums over all ranks of both."""

    def __init__(self, comm: Collectives, dp: Collectives, *, is_wrong: bool) -> None:
        super().__init__(comm)
        self.dp, self.everywhere = dp, Collectives(dist.group.WORLD) if is_wrong else comm

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        own = x.chunk(self.dp.size)[self.dp.rank]
        h = F.silu(F.linear(self.norm(own), self.up))
        own = own + self.everywhere.all_reduce(F.linear(h, self.down))  # two_axes
        return self.dp.all_gather(own, dim=0, dst="I")


def two_axes(ctx: TargetContext) -> tpcompile.Target:
    """Four ranks; what an axis of the mesh cuts, of which the gate does not compare the ranks, is right."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = (Collectives(mesh.get_group(name)) for name in ("tp", "dp"))
    program = OnMesh(tp, dp, is_wrong=_is_wrong(ctx)).requires_grad_(False)
    return tpcompile.Target(program=program, inputs=_inputs(), reference=Sharded(Collectives(None)), mesh=mesh)


class Counted(nn.Module):
    """The mean over the places with a label, of all replicas; the wrong one counts them over all ranks."""

    def __init__(self, dp: Collectives, tp: Collectives, *, is_wrong: bool) -> None:
        super().__init__()
        self.dp, self.layer = dp, Sharded(tp)
        self.counted = Collectives(dist.group.WORLD) if is_wrong else dp

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        own = x.chunk(self.dp.size)[self.dp.rank]
        y = self.layer(own)
        loss = F.mse_loss(y, torch.zeros_like(y), reduction="sum")
        count = self.counted.all_reduce((own[..., 0] > 0).sum().to(x.dtype))  # counted
        return self.dp.all_reduce(loss / count)


def counted(ctx: TargetContext) -> tpcompile.Target:
    """The sum of a replica is right as the sum along dp; what the ranks of tp hold alike is no part of a sum."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = (Collectives(mesh.get_group(name)) for name in ("tp", "dp"))
    program = Counted(dp, tp, is_wrong=_is_wrong(ctx)).requires_grad_(False)
    reference = Counted(Collectives(None), Collectives(None), is_wrong=False)
    return tpcompile.Target(program=program, inputs=_inputs(), reference=reference, mesh=mesh)


class Centred(nn.Module):
    """Batch norm with statistics of all ranks; the wrong one corrects the variance by its own number of samples."""

    def __init__(self, comm: Collectives, *, is_wrong: bool) -> None:
        super().__init__()
        self.comm, self.is_wrong = comm, is_wrong
        self.register_buffer("running_var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> [B, S, D], and the running variance [D]."""
        rows = x.chunk(self.comm.size)[self.comm.rank].flatten(0, 1)
        size = 1 if self.is_wrong else self.comm.size
        mean = self.comm.all_reduce(rows.mean(0), dst="I") / self.comm.size
        var = self.comm.all_reduce((rows - mean).square().mean(0), dst="I") / self.comm.size
        number = len(rows) * size
        self.running_var.lerp_(var * (number / (number - 1)), 0.1)  # statistics
        return (x - mean) * (var + 1e-5).rsqrt(), self.running_var.clone()


class Whole(nn.Module):
    """On one device; torch's op writes the running statistics, which its schema does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As above."""
        return self.norm(x.transpose(1, 2)).transpose(1, 2), self.norm.running_var.clone()


def statistics(ctx: TargetContext) -> tpcompile.Target:
    """Each run begins with the statistics that were there before the first one."""
    program = Centred(Collectives(ctx.mesh.get_group("tp")), is_wrong=_is_wrong(ctx))
    return tpcompile.Target(program=program, inputs=_inputs(), reference=Whole())


class FlatParts(torch.optim.Optimizer):
    """Momentum whose state is spread: each of two replicas has half of it, flat; the wrong one decays it."""

    def __init__(self, params: Any, *, dp: Collectives, is_wrong: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.dp, self.decay = dp, 0.75 if is_wrong else 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Each updates its half, and gets the other."""
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.flatten().chunk(self.dp.size)[self.dp.rank]
            self.state[parameter]["momentum_buffer"] = gradient * self.decay
            own = self.state[parameter]["momentum_buffer"]
            update = self.dp.all_gather(own, dim=0, dst="I")  # flat_parts
            parameter.sub_(0.1 * update.view_as(parameter))


def flat_parts(ctx: TargetContext) -> tpcompile.Target:
    """The state of a rank is a flat half of that of one device."""
    comm = Collectives(ctx.mesh.get_group("tp"))

    def step(program: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        loss: Tensor = program(*inputs).square().mean()
        loss.backward()
        if program.is_whole:  # the copy in float64 has it, too
            torch.optim.SGD(program.parameters(), lr=0.1, momentum=0.9).step()
        else:
            FlatParts(program.parameters(), dp=comm, is_wrong=_is_wrong(ctx)).step()
        return loss.detach()

    return _trained(step)


def _trained(step: Any) -> tpcompile.Target:
    """A layer that all ranks hold, and the same on one device, which `is_whole`."""
    torch.manual_seed(0)
    program = nn.Linear(WIDTH, WIDTH, bias=False)
    reference = copy.deepcopy(program)
    for module, is_whole in ((program, False), (reference, True)):
        module.register_buffer("is_whole", torch.tensor(is_whole))
    return tpcompile.Target(program=program, inputs=_inputs(), reference=reference, step=step)


class ByHand:
    """No optimizer of torch."""

    def __init__(self, module: nn.Module, rate: float) -> None:
        self.parameters, self.rate = list(module.parameters()), rate

    @torch.no_grad()
    def step(self) -> None:
        """Plain descent."""
        for parameter in self.parameters:
            parameter.sub_(self.rate * parameter.grad)  # by_hand


def by_hand(ctx: TargetContext) -> tpcompile.Target:
    """The weights after the step are compared; the gradients and state that one device has are not known here."""
    rate = 0.1 * ctx.world_size if _is_wrong(ctx) else 0.1

    def step(program: Any, inputs: tuple[Tensor]) -> Tensor:
        loss: Tensor = program(*inputs).square().mean()
        loss.backward()
        (torch.optim.SGD(program.parameters(), lr=0.1) if program.is_whole else ByHand(program, rate)).step()
        return loss.detach()

    return _trained(step)


class AdaptedPart(Adapted):
    """The adapter on the samples of this replica; its loss is a part of the whole one."""

    def __init__(self, comm: Collectives, dp: Collectives, *, is_wrong: bool) -> None:
        super().__init__(comm, is_wrong=is_wrong)
        self.dp, self.is_whole = dp, False

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> []."""
        return super().forward(x.chunk(self.dp.size)[self.dp.rank]).square().sum()


class MergedLoss(Merged):
    """The whole loss."""

    is_whole = True

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> []."""
        return super().forward(x).square().sum()


def own_mesh(ctx: TargetContext) -> tpcompile.Target:
    """A mesh of two axes, and a step that sums over one of them: with one rank alone both have one rank."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    dp = Collectives(mesh.get_group("dp"))

    def step(program: Any, inputs: tuple[Tensor]) -> Tensor:
        loss: Tensor = program(*inputs)
        return loss if program.is_whole else dp.all_reduce(loss)

    program = AdaptedPart(Collectives(mesh.get_group("tp")), dp, is_wrong=_is_wrong(ctx))
    return tpcompile.Target(program=program, inputs=_inputs(), reference=MergedLoss(), mesh=mesh, step=step)


def _is_wrong(ctx: TargetContext) -> bool:
    return bool(ctx.settings.get("wrong"))


def _inputs() -> tuple[Tensor]:
    return (torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1)),)
