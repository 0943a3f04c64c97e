"""What gloo ranks do in the sentinel's tests: scenarios by name, one after the other, their results as plain data."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.dist.store import RankStore
from tpcompile.evidence.records import Check, Status, Verdict
from tpcompile.sentinel import Sentinel, protocol

WAIT_S = 60.0


class Block(nn.Module):
    """A layer with one all-reduce."""

    def forward(self, x: Tensor) -> Tensor:
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


class Ranks:
    """This rank and its scenarios; rank 0 serves the store, as torchrun's agent does."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        first = dist.distributed_c10d._get_default_store()
        if self.rank == 0:
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            first.set("port", str(self._server.port))
        self.port = int(first.get("port"))

    def connect(self, prefix: str) -> RankStore:
        client = dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=WAIT_S))
        return RankStore(dist.PrefixStore(prefix, client), rank=self.rank, world_size=dist.get_world_size())

    def sentinel(self, **options: Any) -> Sentinel:
        return Sentinel(connect=self.connect, **options)

    def compiled(self, **options: Any) -> Callable[[Tensor], Tensor]:
        """A fresh compiled function with an all-reduce."""
        torch.compiler.reset()

        def step(x: Tensor) -> Tensor:
            return funcol.all_reduce(x.sin(), "sum", dist.group.WORLD)

        return torch.compile(step, backend="eager", dynamic=False, **options)

    def summary(self, sentinel: Sentinel) -> dict[str, Any]:
        causes = [[str(d.cause) for d in verdict.divergences if d.is_red] for verdict in sentinel.findings]
        calls = [value for key, value in sentinel.stats.items() if key.startswith("calls of")]
        return {
            "causes": causes,
            "ranks": [[g.ranks for g in d.groups] for v in sentinel.findings for d in v.divergences if d.is_red],
            "checks": [(str(c.cause), c.ranks, c.observed) for v in sentinel.findings for c in v.checks if _is_red(c)],
            "compiles": sentinel.stats["compiles"],
            "calls": calls,
            "active": sentinel.is_active,
        }

    # Programs that agree.

    def clean(self) -> dict[str, Any]:
        """Two shapes, the same on both ranks."""
        step = self.compiled()
        with self.sentinel() as sentinel:
            for size in (3, 3, 4, 3):
                step(torch.ones(size))
            before = sentinel.log.num_operations
            for _ in range(500):
                step(torch.ones(3))
            steady = sentinel.log.num_operations - before
        return self.summary(sentinel) | {"steady": steady}

    def reset_in_mid_run(self) -> dict[str, Any]:
        """torch.compiler.reset() forgets callbacks and counts compile ids from 0 again."""
        step = self.compiled()
        with self.sentinel() as sentinel:
            step(torch.ones(3))
            torch.compiler.reset()
            step(torch.ones(3))
        return self.summary(sentinel)

    def opposite_order(self) -> dict[str, Any]:
        """Two functions without collectives, compiled in opposite order."""
        torch.compiler.reset()
        f = torch.compile(lambda x: x + 1, backend="eager")
        g = torch.compile(lambda x: x * 2, backend="eager")
        with self.sentinel() as sentinel:
            for function in (f, g) if self.rank == 0 else (g, f):
                function(torch.ones(3))
            dist.barrier()
        return self.summary(sentinel)

    def one_ranks_own_function(self) -> dict[str, Any]:
        """A compiled metric that only rank 0 ever calls, with sizes of its own."""
        step = self.compiled()
        metric = torch.compile(lambda x: x.mean(), backend="eager", dynamic=False)
        with self.sentinel() as sentinel:
            for size in (3, 4, 5):
                step(torch.ones(3))
                if self.rank == 0:
                    metric(torch.ones(size))
            dist.barrier()
        return self.summary(sentinel)

    def uneven(self) -> dict[str, Any]:
        """Token counts of an expert differ, as declared."""
        step = self.compiled()
        torch.manual_seed(self.rank)
        expert = torch.compile(lambda x: x.relu() * 2, backend="eager", dynamic=False)
        with self.sentinel() as sentinel:
            expert = sentinel.watch(expert, name="expert", uneven="tokens are routed")
            for size in (3, 4, 5):
                expert(torch.ones(size + 3 * self.rank))
                step(torch.ones(3))
        return self.summary(sentinel)

    def uneven_and_slow(self) -> dict[str, Any]:
        """The expert of rank 1 recompiles alone, as declared, for longer than a certain divergence is kept quiet."""
        torch.compiler.reset()
        sizes = ((3, 3), (3, 4))[self.rank]

        def backend(graph: Any, inputs: Any) -> Any:
            if inputs[0].shape == (4,):
                threading.Event().wait(1.0)
            return graph

        def load(x: Tensor) -> Tensor:
            return funcol.all_reduce(x.sum(), "sum", dist.group.WORLD)

        expert = torch.compile(load, backend=backend, dynamic=False)
        with mock.patch.object(protocol, "_COMPILE_S", 0.1), self.sentinel() as sentinel:
            expert = sentinel.watch(expert, name="load", uneven="tokens are routed")
            for size in sizes:
                expert(torch.ones(size))
            threading.Event().wait(0.5)
        return self.summary(sentinel)

    def uneven_in_parts(self) -> dict[str, Any]:
        """A region of two frames, one with a collective, is recompiled on rank 0 alone, as declared."""
        torch.compiler.reset()

        def load(x: Tensor) -> Tensor:
            y = funcol.all_reduce(x.sum(0), "sum", dist.group.WORLD)
            torch._dynamo.graph_break()
            return y * 2

        expert = torch.compile(load, backend="eager", dynamic=False)
        with self.sentinel() as sentinel:
            expert = sentinel.watch(expert, name="load", uneven="tokens are routed")
            expert(torch.ones(8, 4))
            expert(torch.ones(9 if self.rank == 0 else 8, 4))
        return self.summary(sentinel)

    def compiled_while_handling(self) -> dict[str, Any]:
        """A compile in an `except` block has not failed: its code waits for the other ranks like any other."""
        step = self.compiled()
        with (
            self.sentinel() as sentinel,
            mock.patch.object(sentinel.protocol, "must_wait", return_value=False) as waits,
        ):
            try:
                raise ValueError("out of memory, say")
            except ValueError:
                step(torch.ones(3))
            waited = waits.call_count
        return self.summary(sentinel) | {"waited": waited}

    def functions_come_and_go(self) -> dict[str, Any]:
        """Compiled functions that are gone are forgotten: a new one may get the id of an old one."""
        torch.compiler.reset()
        known = []
        with self.sentinel() as sentinel:
            for number in range(3):
                function = torch.compile(lambda x, n=number: x + n, backend="eager")
                for _ in range(2):
                    function(torch.ones(3))
                known.append(len(sentinel._hooks._regions))
                del function
                torch.compiler.reset()
                gc.collect()
            known.append(len(sentinel._hooks._regions))
        return self.summary(sentinel) | {"known": known}

    def modules(self) -> dict[str, Any]:
        """torch.compile(module), module.compile() and layers compiled one by one are all regions."""
        torch.compiler.reset()
        whole, own = torch.compile(Block(), backend="eager"), Block()
        own.compile(backend="eager")
        with self.sentinel() as sentinel:
            for _ in range(3):
                own(whole(torch.ones(3)))
        return self.summary(sentinel)

    def slow(self) -> dict[str, Any]:
        """Rank 1 takes its time while rank 0 waits in a collective, longer than hang_after_s."""
        step = self.compiled()
        with self.sentinel(hang_after_s=0.2) as sentinel:
            step(torch.ones(3))
            if self.rank == 1:
                threading.Event().wait(2.5)
            step(torch.ones(3))
        return self.summary(sentinel)

    def slow_compile(self) -> dict[str, Any]:
        """Rank 1 compiles for longer than its peers' patience."""
        torch.compiler.reset()

        def backend(graph: Any, inputs: Any) -> Any:
            if self.rank == 1:
                threading.Event().wait(2.5)
            return graph

        step = torch.compile(lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD), backend=backend)
        with self.sentinel(hang_after_s=0.2) as sentinel:
            step(torch.ones(3))
            step(torch.ones(3))
        return self.summary(sentinel)

    def limit_on_both(self) -> dict[str, Any]:
        """Both ranks reach the recompile limit at the same call."""
        return self._limited(last=(7, 7))

    def failed_quietly_on_both(self) -> dict[str, Any]:
        """The backend fails on both ranks, and both run eager."""
        return self._failed_quietly(on=(0, 1))

    def closed(self) -> dict[str, Any]:
        """Nothing is left of a closed sentinel, and another one can follow."""
        step = self.compiled()
        step(torch.ones(3))
        threads, sockets = threading.active_count(), _sockets()
        for _ in range(3):
            with self.sentinel():
                step(torch.ones(3))
        return {"threads": threading.active_count() - threads, "sockets": _sockets() - sockets}

    # Programs that do not, under policies that go on.

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
        """Rank 1 is fed a transposed tensor."""
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

    def _limited(self, last: tuple[int, int]) -> dict[str, Any]:
        torch.compiler.reset()

        def step(x: Tensor, count: int) -> Tensor:
            return funcol.all_reduce(x * count, "sum", dist.group.WORLD)

        compiled = torch.compile(step, backend="eager", dynamic=False)
        with torch._dynamo.config.patch(recompile_limit=2), self.sentinel(policy="warn") as sentinel:
            for count in (0, 1, last[self.rank]):
                compiled(torch.ones(3), count)
            self._settle(sentinel, differs=last[0] != last[1])
            gave_up = any(c.limit_reached for c in sentinel.session.compiles())
        return self.summary(sentinel) | {"gave_up": gave_up}

    def _settle(self, sentinel: Sentinel, *, differs: bool) -> None:
        """Ranks that did not wait for each other have said what they had to say."""
        if differs:
            sentinel.wait_for_finding(0)
        else:  # the ranks wait here, and an alarm would come before they are told to go on
            torch.compile(lambda x: funcol.all_reduce(x, "max", dist.group.WORLD), backend="eager")(torch.ones(3))

    def _failing(self, on: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        """A compiled function whose backend lacks a library on these ranks."""
        torch.compiler.reset()

        def backend(graph: Any, inputs: Any) -> Any:
            if self.rank in on:
                raise ImportError("libkernels.so: cannot open shared object file")
            return graph

        def step(x: Tensor) -> Tensor:
            return funcol.all_reduce(x.cos(), "sum", dist.group.WORLD)

        return torch.compile(step, backend=backend, dynamic=False)

    def failed_quietly_on_one_rank(self) -> dict[str, Any]:
        """The backend fails on rank 1, which runs eager and goes on."""
        return self._failed_quietly(on=(1,))

    def _failed_quietly(self, on: tuple[int, ...]) -> dict[str, Any]:
        step = self._failing(on)
        with torch._dynamo.config.patch(suppress_errors=True), self.sentinel(policy="warn") as sentinel:
            for _ in range(3):
                step(torch.ones(3))
            self._settle(sentinel, differs=len(on) == 1)
            failed = any("libkernels.so" in c.failure for c in sentinel.session.compiles())
        return self.summary(sentinel) | {"failed": failed}

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
        with self.sentinel() as sentinel:
            step(torch.ones(3))
            dist.barrier()
            if self.rank == 0:
                del self._server
            for size in (4, 5):
                step(torch.ones(size))
        return self.summary(sentinel)


def _is_red(check: Check) -> bool:
    return check.status == Status.FAIL


def _fail(event: Any) -> None:
    raise ValueError("planted")


def _sockets() -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


def run(names: list[str]) -> dict[str, dict[str, Any]]:
    """The scenarios of those names, in order."""
    ranks = Ranks()
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
