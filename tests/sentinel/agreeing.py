"""Scenarios of ranks that agree: each must end in peace."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.sentinel.ranks import Ranks
from tpcompile.sentinel import protocol


class Block(nn.Module):
    """A layer with one all-reduce."""

    def forward(self, x: Tensor) -> Tensor:
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


class Agreeing(Ranks):
    """Programs that agree."""

    def clean(self) -> dict[str, Any]:
        """Two shapes, the same on both ranks."""
        step = self.compiled()
        with self.sentinel() as sentinel:
            for size in (3, 3, 4, 3):
                step(torch.ones(size))
            before = sentinel.log.num_operations
            for _ in range(200):
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
            watched = sentinel.watch(expert, name="expert", uneven="tokens are routed")
            for number, size in enumerate((3, 4, 5, 6)):
                (expert if number % 2 else watched)(torch.ones(size + 3 * self.rank))
                step(torch.ones(3))
        return self.summary(sentinel)

    def uneven_and_slow(self) -> dict[str, Any]:
        """The expert of rank 1 recompiles alone, as declared, for longer than a suspected divergence is withheld."""
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
        """Compiled functions that no longer exist are forgotten: a new one may get the id of an old one."""
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

    def slow_and_eager(self) -> dict[str, Any]:
        """A program without compiled regions, in which rank 0 waits a little in each of many steps."""
        with self.sentinel(hang_after_s=0.2, skew_limit_s=1.5) as sentinel:
            for _ in range(8):
                if self.rank == 1:
                    threading.Event().wait(0.5)
                dist.all_reduce(torch.ones(3))
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
        """Nothing is left of a closed sentinel, and a second one can follow."""
        step = self.compiled()
        step(torch.ones(3))
        threads, sockets = threading.active_count(), _sockets()
        for _ in range(3):
            with self.sentinel():
                step(torch.ones(3))
        return {"threads": threading.active_count() - threads, "sockets": _sockets() - sockets}


def _sockets() -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))
