"""What ranks do in the tests of this folder: gloo, and a table that has rows for CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

import tpcompile
from tests.by_size.rows import ON_CPU
from tpcompile import collectives
from tpcompile.by_size import Table, sums
from tpcompile.by_size.setting import Sums
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import DivergenceError
from tpcompile.recording import CaptureSession

OP = "torch.ops.tpcompile.all_reduce_by_size.default("
NCCL = "torch.ops._c10d_functional.all_reduce_.default("
SMALL, LARGE, ODD = (8, 16), (64, 64), (7, 3)


def options(table: Table = ON_CPU) -> dict[str, Any]:
    return Sums(table).options


def summed(x: Tensor) -> Tensor:
    return torch.relu(collectives.all_reduce(x * 2, group=dist.group.WORLD)) + 1


def product(x: Tensor, op: str = "sum") -> Tensor:
    """Without kernels of Inductor, which the C++ compiler would take seconds for."""
    return collectives.all_reduce(x @ x.t(), group=dist.group.WORLD, op=op)


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]] = {
    "small": (product, SMALL, torch.float32),
    "large": (product, LARGE, torch.float32),
    "odd": (product, ODD, torch.float32),
    "double": (product, SMALL, torch.float64),
    "max": (partial(product, op="max"), SMALL, torch.float32),
}


def ops_of(name: str) -> dict[str, Any]:
    """What sums in the code of a form, and whether it computes what eager does."""
    torch.compiler.reset()
    program, shape, dtype = FORMS[name]
    x = torch.ones(shape, dtype=dtype) * (dist.get_rank() + 1)
    y, (code,) = run_and_get_code(torch.compile(program, fullgraph=True, dynamic=False, options=options()), x)
    return {"op": code.count(OP), "nccl": code.count(NCCL), "right": torch.equal(y, program(x))}


def all_ops() -> dict[str, dict[str, Any]]:
    return {name: ops_of(name) for name in FORMS}


def replicated_weights() -> dict[str, Any]:
    """Two weights that act on this rank's tokens: how many sums the backward pass has, and whether it is right."""
    torch.compiler.reset()
    comm = Collectives(dist.group.WORLD)

    def program(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return x @ comm.copy_to_tp(first) @ comm.copy_to_tp(second)

    def gradients(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        weights = [torch.arange(n * n, dtype=torch.float32).view(n, n).requires_grad_() for n in (4, 4)]
        return torch.autograd.grad(call(torch.ones(3, 4) * (dist.get_rank() + 1), *weights).sum(), weights)

    compiled = torch.compile(program, fullgraph=True, dynamic=False, options=options())
    found, codes = run_and_get_code(gradients, compiled)
    right = [torch.equal(one, other) for one, other in zip(found, gradients(program), strict=True)]
    return {"sums": sum(code.count(OP) + code.count(NCCL) for code in codes), "right": right}


def dynamic_sizes() -> dict[str, Any]:
    """One code for all sizes chooses at run time."""
    torch.compiler.reset()
    compiled = torch.compile(summed, fullgraph=True, dynamic=True, options=options())
    x = torch.ones(SMALL)
    y, (code,) = run_and_get_code(compiled, x)
    right = [torch.equal(compiled(one), summed(one)) for one in (x, torch.ones(LARGE), torch.ones(ODD))]
    return {
        "rows": code.count(f"'{ON_CPU.rows('cpu', 2)}'"),
        "op": code.count(OP),
        "right": [torch.equal(y, summed(x)), *right],
    }


def evidence() -> dict[str, Any]:
    """What a session records of a graph with the op: the all-reduce, the launches, and nothing that is refused."""
    torch.compiler.reset()
    call = tpcompile.run(summed, "default", all_reduce=ON_CPU, name="summed")
    with fresh_cache(), CaptureSession(records_fusion=True) as session:
        call(torch.ones(SMALL))
        record = session.record(rank=dist.get_rank(), world_size=2)
    (compiled,) = record.compiles
    launches = [item.fields["launch"] for graph in compiled.launched for item in graph.launches]
    return {
        "collectives": [(one.op, one.reduce_op, one.waited, one.used) for one in compiled.collectives],
        "breaks": len(compiled.breaks),
        "launches": [launch for launch in launches if "reduce" in launch],
        "refused": [item.about for item in record.refused_ops],
        "environment": dict(record.environment)["all_reduce of summed"],
        "groups": [
            line.partition("tpcompile")[2]
            for kernel in compiled.kernels
            for line in kernel.code.splitlines()
            if OP in line
        ],
    }


def cached() -> list[tuple[int, int]]:
    """(hits, misses) of Inductor's cache: the same table again, then a different one."""
    found = []
    other = Table(cells=(ON_CPU.cells[0].model_copy(update={"rows": ON_CPU.cells[0].rows[:0]}),))
    with fresh_cache():
        for table in (ON_CPU, ON_CPU, other):
            torch.compiler.reset()
            counters.clear()
            torch.compile(summed, fullgraph=True, dynamic=False, options=options(table))(torch.ones(SMALL))
            found.append((counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]))
    return found


def different_settings() -> str:
    """Rank 1 sums by NCCL."""
    setting: Any = [ON_CPU, "nccl"][dist.get_rank()]
    call = tpcompile.run(summed, "default", is_compiled=True, all_reduce=setting, name="summed", timeout_s=30)
    try:
        call(torch.ones(SMALL))
    except DivergenceError as error:
        return str(error)
    return ""


def texts() -> dict[str, str]:
    """Of the shipped table, which has no CPU; of one that has; of a group on several hosts."""
    found = sums("by_size")
    assert found is not None
    here = {"shipped": found.text(None), "own": Sums(ON_CPU).text(None)}
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return {**here, "two hosts": Sums(ON_CPU).text(None)}
