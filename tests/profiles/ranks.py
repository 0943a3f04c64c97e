"""What ranks do in the tests of this folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.codecache import PersistentCache
from torch._inductor.utils import run_and_get_code

from tests.profiles.recorder import Recorder
from tpcompile.errors import ConfigError, DivergenceError
from tpcompile.profiles import TUNED, callables, chosen, run
from tpcompile.profiles.agreement import Agreement
from tpcompile.profiles.callables import Tuned

WAIT_S = 1.0
"""Of a rank that does not come."""


def summed(x: Tensor, factor: float = 1.0) -> Tensor:
    y = x * factor
    dist.all_reduce(y)
    return y


def profiled(profile: str, *, timeout_s: float = 60.0, program: Callable[..., Any] = summed) -> Any:
    """A callable whose graphs a recorder makes."""
    callables.CudaGraphs = Recorder  # type: ignore[assignment,misc]
    callables.no_graphs = lambda group: ""
    return run(program, profile, is_compiled=True, timeout_s=timeout_s, name="summed")  # type: ignore[arg-type]


def what_is_raised(call: Callable[[], object]) -> str:
    """The text of a DivergenceError; empty for none."""
    try:
        call()
    except DivergenceError as error:
        return str(error)
    return ""


def different_profiles() -> str:
    call = profiled(["graphed", "default"][dist.get_rank()])
    return what_is_raised(lambda: call(torch.ones(2)))


def different_signatures() -> list[str]:
    rank = dist.get_rank()
    call = profiled("graphed")
    return [what_is_raised(lambda shape=shape: call(torch.ones(shape))) for shape in (2, 3 + rank)]


def one_rank_captures() -> str:
    """Rank 0 has a new shape, rank 1 none."""
    call = profiled("graphed", timeout_s=WAIT_S)
    call(torch.ones(2))
    text = what_is_raised(lambda: call(torch.ones(3))) if dist.get_rank() == 0 else ""
    dist.barrier()
    return text


def comes_late() -> str:
    """Rank 1 comes when rank 0 has given up: it must not go on alone."""
    call = profiled("graphed", timeout_s=WAIT_S)
    if dist.get_rank() == 1:
        dist.barrier()
    text = what_is_raised(lambda: call(torch.ones(2)))
    if dist.get_rank() == 0:
        dist.barrier()
    return text


def has_died() -> str:
    """Rank 1 gives the pid of a process that has ended, and never comes."""
    if dist.get_rank() == 1:
        ended = subprocess.Popen(["true"])
        ended.wait()
        os.getpid = lambda: ended.pid
    call = profiled("graphed", timeout_s=3600.0)
    text = what_is_raised(lambda: call(torch.ones(2))) if dist.get_rank() == 0 else ""
    dist.barrier()
    return text


def equal_ranks() -> dict[str, Any]:
    """A few calls of two signatures; how often the store was asked in those that are replays."""
    rank = dist.get_rank()
    call = profiled("graphed")
    sums = [call(torch.full((size,), 1.0 + rank)).tolist() for size in (2, 3)]
    store = call._steps._agreement._store._store
    before = store.num_keys()
    sums += [call(torch.full((size,), 2.0 + rank)).tolist() for size in (2, 3, 2)]
    return {
        "sums": sums, "captures": call.num_captures, "replays": call.num_replays, "keys": store.num_keys() - before,
        "profile": call.profile,
    }  # fmt: skip


def one_rank_cannot_capture() -> str:
    """Rank 1 runs out of memory in its capture: rank 0 must not replay alone."""
    call = profiled("graphed")
    if dist.get_rank() == 1:
        # A real capture would not issue the collective of the program; that of the recorder does, on both ranks.
        call._calls["graphed"]._recorder.capture = lambda program: (program(), torch.empty(1 << 60))
    try:
        call(torch.ones(2))
    except ConfigError as error:
        return str(error)
    return ""


def destroys_group() -> list[bool]:
    """Whether the graph lives before and after the end of the process group."""
    call = profiled("graphed")
    call(torch.ones(2))
    (graph,) = call._calls["graphed"]._recorder.graphs
    seen = [graph.is_live]
    dist.destroy_process_group()
    seen.append(graph.is_live)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # which the end of a rank destroys
    return seen


def measured() -> dict[str, Any]:
    """`default` is slow on rank 1 only."""
    rank = dist.get_rank()
    layer = nn.Linear(1, 1, bias=False)

    def program(x: Tensor) -> Tensor:
        layer.weight.sum().backward()
        return summed(x)

    call = profiled("measured", program=program)
    seconds = {"default": 1.0 + 2.0 * rank, "graphed": 2.0}
    callables.timings = lambda calls, finish: {name: seconds[name] for name in calls if calls[name]() is not None}
    total = call(torch.full((2,), 1.0 + rank))
    return {
        "profile": call.profile, "sum": total.tolist(), "environment": chosen.entries(without=[]),
        "gradient": layer.weight.grad.flatten().tolist(),
    }  # fmt: skip


def only_candidate() -> tuple[str, dict[str, float], int]:
    """On a machine without GPUs: what runs, its times, and how often the program was called."""
    numbers = []
    call = run(lambda x: numbers.append(0) or summed(x), is_compiled=True)
    call(torch.ones(2))
    return call.profile, call.measurement.slowest_ms, len(numbers)


def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b).relu()


def tuned() -> dict[str, bool]:
    """Whether the code calls the library, when each rank times by itself, and when the first does it for all.

    The clocks of the ranks prefer different candidates.
    """

    def times_of_this_rank(self: Any, choices: Any, op: str, inputs: str, benchmark: Any, **options: Any) -> Any:
        order = list(range(len(choices)))
        return dict(zip(choices, order if dist.get_rank() else reversed(order), strict=True))

    PersistentCache.lookup = times_of_this_rank  # type: ignore[method-assign]
    x = torch.ones(2, 16, 16)
    found = {}
    alone = torch.compile(product, options=TUNED)
    with run(product, "max-autotune") as together:
        for name, call in (("alone", alone), ("together", together)):
            torch.compiler.reset()
            _, (code,) = run_and_get_code(call, x, x)
            found[name] = "extern_kernels.bmm(" in code
    return found


def asks_for_other_times() -> str:
    """Rank 1 compiles a different product."""
    x = torch.ones(2, 16 + 16 * dist.get_rank(), 16)
    agreement = Agreement([0, 1], timeout_s=60.0)
    return what_is_raised(lambda: Tuned(product, agreement)._share(f"bmm of {list(x.shape)}", ["a"], lambda: [1.0]))


def first_rank_tunes_nothing() -> str:
    agreement = Agreement([0, 1], timeout_s=WAIT_S)
    call = Tuned(product, agreement)
    text = what_is_raised(lambda: call._share("bmm", ["a"], lambda: [1.0])) if dist.get_rank() == 1 else ""
    dist.barrier()
    return text
