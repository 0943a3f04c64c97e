"""Small two-rank jobs that know nothing of this package -> `jobs/torch-VERSION/JOB/`, as TORCH_TRACE writes them.

Run once, with the newest torch, from the repository's root:

    .venv/bin/python -m tests.data.record_jobs

Cleaned as in record_traces: only the events our parser reads are kept, without paths of this machine.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo.config
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor

from tests.data.record_traces import HERE, cleaned
from tpcompile.testing import run_on_ranks

funcol = torch.ops._c10d_functional


def reduced(x: Tensor, op: str = "sum", group: str = "") -> Tensor:
    """One all-reduce that is waited for at once."""
    name = group or dist.group.WORLD.group_name
    return funcol.wait_tensor(funcol.all_reduce(x, op, name))


def healthy(x: Tensor) -> Tensor:
    """A region that is equal on all ranks."""
    return reduced(torch.relu(x) * 2) + 1


def stride(rank: int) -> None:
    """Rank 1 passes the second batch transposed."""
    step = torch.compile(healthy, backend="aot_eager")
    step(torch.ones(4, 4))
    step(torch.ones(4, 4).t() if rank == 1 else torch.ones(4, 4))


def reduce_op(rank: int) -> None:
    """Rank 1 takes the maximum where rank 0 sums."""
    op = "max" if rank == 1 else "sum"

    def step(x: Tensor) -> Tensor:
        return reduced(torch.relu(x), op)

    torch.compile(step, backend="aot_eager")(torch.ones(4, 4))


def order(rank: int) -> None:
    """Rank 1 issues its two all-reduces, of two groups, in the opposite order; it waits last, so that gloo survives."""
    calls = [("sum", dist.group.WORLD.group_name), ("max", dist.new_group([0, 1]).group_name)]
    if rank == 1:
        calls.reverse()

    def step(x: Tensor) -> Tensor:
        works = [funcol.all_reduce(x, op, group) for op, group in calls]
        return funcol.wait_tensor(works[0]) + funcol.wait_tensor(works[1])

    torch.compile(step, backend="aot_eager")(torch.ones(4, 4))


def graph_break(rank: int) -> None:
    """Rank 0 prints in the middle of the region."""

    def step(x: Tensor) -> Tensor:
        y = torch.relu(x)
        if rank == 0:
            print("step")
        return reduced(y)

    torch.compile(step, backend="aot_eager")(torch.ones(4, 4))


class Counter(torch.nn.Module):
    """A module with an attribute that the graph is specialised on."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same."""
        return reduced(x * self.count)


def limit(rank: int) -> None:
    """Rank 1 changes an attribute more often than torch is willing to recompile."""
    torch._dynamo.config.recompile_limit = 1
    model = Counter()
    step = torch.compile(model, backend="aot_eager")
    for number in range(3):
        model.count = number if rank == 1 else 0
        step(torch.ones(4, 4))


def clean(rank: int) -> None:
    """Both ranks run the same region through Inductor."""
    torch._inductor.config.compile_threads = 1
    torch.compile(healthy)(torch.ones(4, 4))


class Scaled(torch.nn.Module):
    """A row-parallel linear and a scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = torch.nn.Parameter(torch.ones(4, 4)), scale

    def forward(self, x: Tensor) -> Tensor:
        """[B, 4] -> [B, 4]; breaks its graph in the middle."""
        y = reduced(x @ self.weight)
        torch._dynamo.graph_break()
        return torch.relu(y) * self.scale


def _train(scale: float) -> None:
    """Steps with a graph break, a recompile with dynamic sizes and a backward; then a function through Inductor."""
    torch._inductor.config.compile_threads = 1
    step = torch.compile(Scaled(scale), backend="aot_eager")
    for size in (2, 3):
        step(torch.ones(size, 4)).sum().backward()
    torch.compile(reduced)(torch.ones(3))


def training(rank: int) -> None:
    """All ranks train the same program."""
    _train(0.5)


def training_scale(rank: int) -> None:
    """Rank 1 has a different constant behind the graph break."""
    _train(0.5 * (rank + 1))


JOBS: dict[str, Callable[[int], None]] = {
    "stride": stride, "reduce_op": reduce_op, "order": order, "graph_break": graph_break, "limit": limit,
    "cold_shared": clean, "warm_cold": clean, "training": training, "training_scale": training_scale,
}  # fmt: skip


def run(name: str, caches: str, is_shared: bool) -> None:
    """One job on this rank, with its Inductor cache."""
    rank = dist.get_rank()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches if is_shared else str(Path(caches, str(rank)))
    JOBS[name](rank)


def record(name: str, folder: Path) -> None:
    """Run one job and keep what its ranks traced."""
    with tempfile.TemporaryDirectory() as work:
        caches = str(Path(work, "caches"))
        if name == "warm_cold":
            run_on_ranks(run, name, caches, False)
            shutil.rmtree(Path(caches, "1"))
        os.environ["TORCH_TRACE"] = str(Path(work, "trace"))
        run_on_ranks(run, name, caches, name != "warm_cold", timeout_s=400.0)
        del os.environ["TORCH_TRACE"]
        folder.mkdir(parents=True)
        for rank in range(2):
            (path,) = Path(work, "trace").glob(f"*_rank_{rank}_*")
            (folder / f"dedicated_log_torch_trace_rank_{rank}_recorded.log").write_text(cleaned(path.read_text(), work))


def main() -> None:
    """Record all jobs with the torch that runs this."""
    folder = HERE / "jobs" / f"torch-{torch.__version__.partition('+')[0]}"
    shutil.rmtree(folder, ignore_errors=True)
    for name in JOBS:
        record(name, folder / name)


if __name__ == "__main__":
    main()
