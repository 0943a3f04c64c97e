"""Gloo ranks that say which of their values are equal on all ranks; scenarios by name, their results as plain data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tpcompile.errors import ConfigError
from tpcompile.sentinel import Sentinel

ODD = 2
"""The rank on which something is different."""
_LIVE_S = 20.0


class Ranks:
    """This rank and its scenarios."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.is_odd = self.rank == ODD

    def sentinel(self, **options: Any) -> Sentinel:
        """Without executed lines, which another Python records by itself: what is said does not depend on it."""
        return Sentinel(policy="warn", prints=False, **{"flow": False, **options})

    def found(self, sentinel: Sentinel) -> list[dict[str, Any]]:
        """What this rank knows was found."""
        leads = [verdict.lead for verdict in sentinel.findings if verdict.lead is not None]
        return [
            {
                "cause": str(lead.cause),
                "says": lead.says,
                "ranks": lead.ranks,
                "is_rank_known": lead.is_rank_known,
                "set_at": lead.line.code if lead.line and lead.seen_at else "",
                "code": (lead.seen_at or lead.line).code if lead.line else "",
            }
            for lead in leads
        ]

    def token(self) -> Any:
        """A sampled token differs from step 3 on."""
        with self.sentinel() as sentinel:
            for step in range(6):
                token = torch.tensor([step, 7])
                if self.is_odd and step >= 3:
                    token = token.flip(0)
                sentinel.agree("tokens", token, step=step)  # the line of the tokens
        return self.found(sentinel)

    def token_while_it_runs(self) -> Any:
        """The same, while the ranks go on: found before the block ends."""
        begun_s = time.monotonic()
        with self.sentinel() as sentinel:
            step = 0
            go_on = torch.ones(1)
            while go_on.item():
                sentinel.agree("tokens", torch.tensor([step + (self.is_odd and step >= 30)]))
                step += 1
                time.sleep(0.01)
                is_done = bool(sentinel.findings) or time.monotonic() - begun_s > _LIVE_S
                go_on = torch.tensor([float(not is_done)])
                dist.all_reduce(go_on, op=dist.ReduceOp.MAX)  # until all ranks know it
            before_the_end = len(sentinel.findings)
        return [*self.found(sentinel), {"before_the_end": before_the_end}]

    def router(self) -> Any:
        """A compiled router chooses another expert at its third call; its outputs are said to be equal."""
        torch.compiler.reset()
        compiled = torch.compile(lambda x: (x.argmax(1).int(), x.softmax(1)), backend="eager", dynamic=False)
        with self.sentinel() as sentinel:
            router = sentinel.watch(compiled, name="router", agree="experts")
            for step in range(5):
                x = torch.eye(4)
                x[1, 3] = 0.5 if step < 2 or not self.is_odd else 1.5
                router(x)  # the line of the router
        return self.found(sentinel)

    def drifted(self) -> Any:
        """One parameter changes by one unit in its last place at step 7; the parameters are compared every 5 steps."""
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        with self.sentinel() as sentinel, torch.no_grad():
            for step in range(16):
                if self.is_odd and step == 7:
                    weight = model.weight.view(-1)
                    weight[5] = torch.nextafter(weight[5], torch.tensor(torch.inf))
                sentinel.agree("parameters", dict(model.named_parameters()), every=5, step=step)
        return self.found(sentinel)

    def loss(self) -> Any:
        """A Python number that is different on one rank."""
        with self.sentinel() as sentinel:
            for step in range(3):
                sentinel.agree("loss", 1.5 if self.is_odd and step == 1 else 1.25)
        return self.found(sentinel)

    def set_apart(self) -> Any:
        """A number from which the value is made differs from step 5 on; the executed lines are recorded."""
        with self.sentinel(flow=True) as sentinel:
            for step in range(8):
                temperature = _temperature(step)
                sentinel.agree("hidden", torch.ones(3) / temperature, step=step)
                dist.all_reduce(torch.ones(3))
        return self.found(sentinel)

    def left_out(self) -> Any:
        """One rank leaves out a call between two values."""
        with self.sentinel() as sentinel:
            for step in range(5):
                sentinel.agree("loss", float(step))
                if not (self.is_odd and step == 2):
                    sentinel.agree("norm", 2.0)
        return self.found(sentinel)

    def stopped(self) -> Any:
        """One rank says nothing any more from step 4 on, and goes on to the end."""
        with self.sentinel() as sentinel:
            for step in range(8):
                if not self.is_odd or step < 4:
                    sentinel.agree("tokens", torch.tensor([step]))
        return self.found(sentinel)

    def never(self) -> Any:
        """One rank never says anything."""
        with self.sentinel() as sentinel:
            if not self.is_odd:
                sentinel.agree("tokens", torch.tensor([1]))
        return self.found(sentinel)

    def in_a_domain(self) -> Any:
        """Tensor-parallel groups of two ranks: their values differ between groups, and in the second one within it."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with self.sentinel(mesh=mesh, axis="tp") as sentinel:
            for step in range(4):
                sentinel.agree("loss", mesh.get_local_rank("dp") + 0.5 * (self.is_odd and step == 2))
        return self.found(sentinel)

    def healthy(self) -> Any:
        """Values of all kinds, equal on all ranks; and a rank that is slow."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        replicated = distribute_tensor(torch.arange(8.0), mesh, [Replicate()])
        with self.sentinel(mesh=mesh, axis="tp") as sentinel:
            before = sentinel.log.num_operations
            for step in range(200):
                x = torch.full((3, 5), float(step))
                nan = torch.tensor(float("nan"))
                for value in (x, x.t(), x.bfloat16(), x > 2, nan, x[:0], x.to(torch.float8_e4m3fn)):
                    sentinel.agree("tensor", value, step=step)
                sentinel.agree("dtensor", replicated)
                sentinel.agree("python", {"loss": 0.1 * step, "names": ["a", "b"], "none": None, "at": (1, True)})
                if self.is_odd and step == 100:
                    time.sleep(1.0)
            operations = sentinel.log.num_operations - before
        return [*self.found(sentinel), {"operations": operations}]

    def refused(self) -> Any:
        """What cannot be compared is refused with what to do."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        sharded: DTensor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        sentinel = self.sentinel(mesh=mesh, axis="tp")
        errors = [_error(lambda: sentinel.agree("x", 1))]
        with sentinel:
            errors += [
                _error(lambda: sentinel.agree("x", sharded)),
                _error(lambda: sentinel.agree("x", object())),
                _error(lambda: sentinel.agree("x", torch.ones(2, device="meta"))),
                _error(lambda: sentinel.agree("x", torch.eye(2).to_sparse())),
                _error(lambda: sentinel.agree("", 1)),
                _error(lambda: sentinel.agree("x", 1, every=0)),
                _error(lambda: sentinel.watch(torch.compile(_twice), agree="x", every=-1)),
            ]
        return [*self.found(sentinel), {"errors": errors}]


def _temperature(step: int) -> float:
    temperature = 1.0
    if step >= 5 and dist.get_rank() == ODD:
        temperature = 2.0
    return temperature


def _twice(x: Tensor) -> Tensor:
    return x * 2


def _error(act: Callable[[], object]) -> str:
    try:
        act()
    except ConfigError as error:
        return str(error)
    return ""


def run(names: list[str]) -> dict[str, Any]:
    """The scenarios of those names, in order."""
    ranks = Ranks()
    found = {}
    for name in names:
        found[name] = getattr(ranks, name)()
        dist.barrier()
    return found
