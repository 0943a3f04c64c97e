"""A gloo rank of the sentinel's tests: its sentinels, and what several scenarios do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tpcompile.evidence.records import Check, Status
from tpcompile.sentinel import Sentinel

WAIT_S = 60.0


class Ranks:
    """This rank and its scenarios."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def sentinel(self, **options: Any) -> Sentinel:
        return Sentinel(**options)

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

    def _settle(self, sentinel: Sentinel, *, differs: bool) -> None:
        """Wait until ranks that did not wait for each other have published everything."""
        if differs:
            sentinel.wait_for_finding(0)
        else:  # the ranks wait here, and an alarm would come before they are told to go on
            torch.compile(lambda x: funcol.all_reduce(x, "max", dist.group.WORLD), backend="eager")(torch.ones(3))

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

    def _failed_quietly(self, on: tuple[int, ...]) -> dict[str, Any]:
        step = self._failing(on)
        with torch._dynamo.config.patch(suppress_errors=True), self.sentinel(policy="warn") as sentinel:
            for _ in range(3):
                step(torch.ones(3))
            self._settle(sentinel, differs=len(on) == 1)
            failed = any("libkernels.so" in c.failure for c in sentinel.session.compiles())
        return self.summary(sentinel) | {"failed": failed}


def _is_red(check: Check) -> bool:
    return check.status == Status.FAIL
