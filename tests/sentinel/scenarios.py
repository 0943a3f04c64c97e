"""What gloo ranks do in the sentinel's tests: scenarios by name, one after the other, their results as plain data."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.sentinel.agreeing import Agreeing
from tests.sentinel.ranks import WAIT_S, Ranks
from tpcompile.evidence.records import Verdict


class Scenarios(Agreeing):
    """Those, and programs that do not, under policies that go on."""

    def warned(self) -> dict[str, Any]:
        """A rank constant: reported once, then the job runs to its end."""
        torch.compiler.reset()
        factor = self.rank + 1

        def step(x: Tensor) -> Tensor:
            return funcol.all_reduce(x * factor, "sum", dist.group.WORLD)

        compiled = torch.compile(step, backend="eager", dynamic=False)
        with self.sentinel(policy="warn") as sentinel:
            for size in (3, 3, 4):
                compiled(torch.ones(size))
        return self.summary(sentinel)

    def called_back(self) -> dict[str, Any]:
        """The same, with a function that gets the verdict."""
        step = self.compiled()
        got: list[Verdict] = []
        with self.sentinel(policy=got.append) as sentinel:
            step(torch.ones(3))
            step(torch.ones(3, 2).t()[0] if self.rank == 0 else torch.ones(3))
        return self.summary(sentinel) | {"got": [v.exit_code for v in got]}

    def allowed(self) -> dict[str, Any]:
        """An intended difference with its reason is no finding."""
        torch.compiler.reset()
        factor = self.rank + 1
        compiled = torch.compile(
            lambda x: funcol.all_reduce(x * factor, "sum", dist.group.WORLD), backend="eager", dynamic=False
        )
        reasons = [("graph", "mul(", "scale of this rank"), ("guards", "factor", "scale of this rank")]
        with self.sentinel(allow=reasons) as sentinel:
            compiled(torch.ones(3))
        return self.summary(sentinel)

    def one_rank_recompile(self) -> dict[str, Any]:
        """Rank 1 receives a transposed tensor."""
        step = self.compiled()
        with self.sentinel(policy="warn") as sentinel:
            for number in range(4):
                x = torch.ones(4, 4)
                step(x.t() if self.rank == 1 and number == 2 else x)
        return self.summary(sentinel)

    def not_compiled_on_one_rank(self) -> dict[str, Any]:
        """Rank 1 runs eager from the start; the watched call ends without a compile."""
        step = self.compiled()
        with self.sentinel(policy="warn") as sentinel:
            watched = sentinel.watch(step if self.rank == 0 else lambda x: x, name="step")
            if self.rank == 1:
                watched(torch.ones(3))
                dist.all_reduce(torch.ones(3))  # what keeps rank 0 from hanging, since the policy goes on
            else:
                watched(torch.ones(3))
        return self.summary(sentinel)

    def eager_on_one_rank(self) -> dict[str, Any]:
        """The same, not watched: a finding about no position frees the rank that waits, and ends nothing else."""
        step = self.compiled()
        local = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        with self.sentinel(policy="warn") as sentinel:
            local(torch.ones(3))
            if self.rank == 0:
                step(torch.ones(3))
            else:
                dist.all_reduce(torch.ones(3).sin())
            sentinel.wait_for_finding(0)
            if self.rank == 1:
                step(torch.ones(3))
            else:
                dist.all_reduce(torch.ones(3).sin())
            step(torch.ones(4))
            local(torch.ones(4 + self.rank))
            sentinel.wait_for_finding(1)
        return self.summary(sentinel)

    def policy_fails(self) -> dict[str, Any]:
        """A policy that raises on one rank, and one that ends the process."""
        found: dict[str, Any] = {}

        def ends(verdict: Verdict) -> None:
            raise SystemExit(7)

        def fails(verdict: Verdict) -> None:
            raise RuntimeError("pager is down")

        for name, policy in (("ends", ends), ("fails", fails)):
            codes: list[int] = []
            step = self.compiled()
            with self.sentinel(policy=policy) as sentinel:
                sentinel.shutdown.leave = codes.append  # type: ignore[method-assign]
                step(torch.ones(3, 2).t()[0] if self.rank == 0 else torch.ones(3))
                dist.barrier()
                found[name] = (codes, len(sentinel.findings), sentinel.is_active)
        return found

    def limit_on_one_rank(self) -> dict[str, Any]:
        """Rank 1 passes a third number to code that torch compiles twice."""
        return self._limited(last=(1, 7))

    def failed_quietly_on_one_rank(self) -> dict[str, Any]:
        """The backend fails on rank 1, which runs eager and goes on."""
        return self._failed_quietly(on=(1,))

    def failed_loudly_on_one_rank(self) -> dict[str, Any]:
        """The backend fails on rank 1, the first to compile, and the exception ends its part of the program."""
        step, raised = self._failing((1,)), ""
        try:
            with self.sentinel(policy="warn") as sentinel:
                if self.rank == 1:
                    step(torch.ones(3))
                sentinel.wait_for_finding(0)
        except Exception as error:
            raised = type(error).__name__
        return self.summary(sentinel) | {"raised": raised}

    def forked(self) -> dict[str, Any]:
        """A worker is forked, looks at the sentinel, leaves its block, and is terminated."""
        step, (read, write) = self.compiled(), os.pipe()
        with self.sentinel(policy="warn") as sentinel:
            step(torch.ones(3))
            child = os.fork()
            if child == 0:
                os.write(write, b"active" if sentinel.is_active else b"inactive")
                sentinel.close()
                time.sleep(WAIT_S)
                os._exit(0)
            said = os.read(read, 64).decode()
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)
            step(torch.ones(4))
            found = self.summary(sentinel)
        return found | {"child": said}

    def follower_dies(self) -> dict[str, Any]:
        """The sentinel's own thread fails on rank 1: all ranks stop watching and the job goes on."""
        step = self.compiled()
        with self.sentinel() as sentinel:
            step(torch.ones(3))
            if self.rank == 1:
                sentinel.listener._heard = _fail  # type: ignore[method-assign]
            step(torch.ones(4))
            dist.barrier()
            deadline = threading.Event()
            for _ in range(200):
                if not sentinel.is_active:
                    break
                deadline.wait(0.02)
            step(torch.ones(5))
        return self.summary(sentinel)

    def store_gone(self) -> dict[str, Any]:
        """The store goes away; last, because nothing can use it afterwards."""
        step = self.compiled()
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if self.rank == 0 else None
        ports = [server and server.port]
        dist.broadcast_object_list(ports)
        os.environ["MASTER_PORT"] = str(ports[0])
        with self.sentinel() as sentinel:
            step(torch.ones(3))
            dist.barrier()
            del server
            for size in (4, 5):
                step(torch.ones(size))
        return self.summary(sentinel)


def _fail(event: Any) -> None:
    raise ValueError("planted")


def run(names: list[str]) -> dict[str, dict[str, Any]]:
    """The scenarios of those names, in order."""
    ranks = Scenarios()
    return {name: getattr(ranks, name)() for name in names}


def on_mesh() -> dict[str, Any]:
    """dp x tp on four ranks: rank 3 recompiles alone; only its tp group has something to compare."""
    ranks = Ranks()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("tp")
    compiled = torch.compile(lambda x: funcol.all_reduce(x, "sum", group), backend="eager", dynamic=False)
    with ranks.sentinel(mesh=mesh, axis="tp", policy="warn") as sentinel:
        replica = mesh.get_local_rank("dp")
        for number in range(3):
            size = 3 + replica  # replicas may be fed differently
            compiled(torch.ones(size, 4)[:, ::2] if ranks.rank == 3 and number == 2 else torch.ones(size, 2))
        dist.barrier()
    return ranks.summary(sentinel) | {"domain": sentinel.domain}
