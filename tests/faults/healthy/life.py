"""What else happens in a job: slow ranks, evaluation, checkpoints, data loaders, other processes, reset."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.data import DataLoader, Dataset

from tests.faults.healthy.program import Run, program, sgd

_LONG_S = 4.0
"""Longer than a sentinel waits before it asks what the other ranks do."""


@program(trains=(True,))
def evaluation_between_steps(run: Run) -> None:
    """An evaluation loop under no_grad every second training step."""
    mlp = run.mlp()
    compiled, optimizer = run.compile(mlp), sgd(mlp)
    for step in run.steps():
        mlp.train()
        run.advance(compiled, optimizer, run.data(step))
        if step % 2:
            mlp.eval()
            with torch.no_grad():
                for batch in range(2):
                    compiled(run.data(100 + batch))


@program(trains=(True,))
def gradient_accumulation(run: Run) -> None:
    """Three backward passes an optimizer step, gradients averaged over a data-parallel copy by hand."""
    mlp = run.mlp()
    compiled = run.compile(mlp)
    optimizer = sgd(mlp)
    for step in run.steps():
        for micro in range(3):
            compiled(run.data(10 * step + micro)).square().mean().backward()
        for parameter in mlp.parameters():
            dist.all_reduce(parameter.grad[0], group=run.group)
        optimizer.step()
        optimizer.zero_grad()


@program()
def always_one_slow_rank(run: Run) -> None:
    """The last rank takes seconds before its first compile, and again before a recompile."""
    mlp = run.mlp()
    compiled = run.compile(mlp, dynamic=False)
    optimizer = sgd(mlp)
    for step in run.steps():
        if run.tp_rank == run.tp - 1 and step in (0, 2):
            time.sleep(_LONG_S)
        run.advance(compiled, optimizer, run.data(step, 2, 4 + step // 2, run.draw.width))


@program(backends=("aot_eager",))
def slow_compile(run: Run) -> None:
    """The compiler itself takes seconds longer on rank 0."""
    aot_eager = lookup_backend("aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        if run.rank == 0:
            time.sleep(_LONG_S)
        return aot_eager(graph, inputs)

    mlp = run.mlp()
    compiled, optimizer = torch.compile(mlp, backend=backend), sgd(mlp)
    for step in run.steps():
        run.advance(compiled, optimizer, run.data(step))


@program()
def checkpoint_written_by_one(run: Run) -> None:
    """Rank 0 takes seconds to save while all other ranks wait in a barrier; then all ranks load."""
    mlp = run.mlp()
    compiled, optimizer = run.compile(mlp), sgd(mlp)
    for step in run.steps():
        run.advance(compiled, optimizer, run.data(step))
        if step == 1:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(mlp.state_dict(), Path(folder) / "mlp.pt")
                if run.rank == 0:
                    time.sleep(_LONG_S)
                dist.barrier()
                mlp.load_state_dict(torch.load(Path(folder) / "mlp.pt"))


@program(sizes=(2, 4))
def reset_in_mid_run(run: Run) -> None:
    """`torch.compiler.reset()` on all ranks, then everything compiles again."""
    mlp = run.mlp()
    compiled = run.compile(mlp)
    optimizer = sgd(mlp)
    for step in run.steps():
        if step == 2:
            torch.compiler.reset()
        run.advance(compiled, optimizer, run.data(step))


@program()
def model_built_again(run: Run) -> None:
    """A new module of the same class, compiled anew, as in a sweep."""
    for number in range(2):
        mlp = run.mlp(seed=number)
        compiled = run.compile(mlp)
        optimizer = sgd(mlp)
        for step in run.steps():
            run.advance(compiled, optimizer, run.data(step))


@program()
def batches_from_a_thread(run: Run) -> None:
    """A background thread makes the batches, with tensor work of its own."""
    batches: queue.Queue[Tensor] = queue.Queue(maxsize=2)

    def produce() -> None:
        for step in range(run.draw.steps):
            batches.put(run.data(step).cumsum(-1).tanh())

    threading.Thread(target=produce, daemon=True).start()
    mlp = run.mlp()
    compiled, optimizer = run.compile(mlp), sgd(mlp)
    for _ in run.steps():
        run.advance(compiled, optimizer, batches.get(timeout=60))


class _Batches(Dataset[Tensor]):
    def __init__(self, length: int, shape: tuple[int, ...]) -> None:
        self.length, self.shape = length, shape

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(index))


@program()
def data_loader_workers(run: Run) -> None:
    """A DataLoader with two forked worker processes, made anew every epoch."""
    mlp = run.mlp()
    compiled = run.compile(mlp)
    optimizer = sgd(mlp)
    dataset = _Batches(4, (run.draw.tokens, run.draw.width))
    for _ in run.steps():
        for batch in DataLoader(dataset, batch_size=2, num_workers=2):
            run.advance(compiled, optimizer, batch.to(run.device))


def _square(number: int) -> int:
    return number * number


@program()
def forked_pool_terminated(run: Run) -> None:
    """Worker processes forked and ended by SIGTERM between steps, as `multiprocessing.Pool` does."""
    mlp = run.mlp()
    compiled = run.compile(mlp)
    optimizer = sgd(mlp)
    for step in run.steps():
        run.advance(compiled, optimizer, run.data(step))
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert sum(pool.map(_square, range(4))) == 14


@program()
def forked_executor(run: Run) -> None:
    """A process pool that ends by itself."""
    mlp = run.mlp()
    compiled = run.compile(mlp)
    optimizer = sgd(mlp)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        for step in run.steps():
            run.advance(compiled, optimizer, run.data(step))
            assert list(pool.map(_square, range(3))) == [0, 1, 4]


@program(sizes=(2, 4))
def eager_collectives_between(run: Run) -> None:
    """Collectives of torch's own between compiled steps: barrier, broadcast, objects, a tensor read on the host."""
    mlp = run.mlp()
    compiled, optimizer = run.compile(mlp), sgd(mlp)
    for step in run.steps():
        y = run.advance(compiled, optimizer, run.data(step))
        norm = y.square().sum()
        dist.all_reduce(norm, group=run.group)
        assert norm.item() >= 0
        settings: list[Any] = [{"step": step}] if run.tp_rank == 0 else [None]
        dist.broadcast_object_list(settings, group_src=0, group=run.group)
        dist.barrier(group=run.group)


@program()
def ranks_end_at_other_times(run: Run) -> None:
    """The last rank has seconds of work of its own after the last step."""
    mlp = run.mlp()
    compiled = run.compile(mlp)
    optimizer = sgd(mlp)
    for step in run.steps():
        run.advance(compiled, optimizer, run.data(step))
    if run.tp_rank == run.tp - 1:
        time.sleep(_LONG_S)


def _warmed_up(run: Run) -> tuple[Any, Any]:
    mlp = run.mlp()
    compiled = run.compile(mlp)
    for step in range(2):
        compiled(run.data(step))
    return mlp, compiled


@program(can_repeat=False, prepare=_warmed_up)
def compiled_before_the_sentinel(run: Run) -> None:
    """Regions that were compiled and called before there was a sentinel."""
    mlp, compiled = run.prepared
    optimizer = sgd(mlp)
    for step in run.steps():
        run.advance(compiled, optimizer, run.data(step))
        run.advance(compiled, optimizer, run.data(step, 1, 3 + step // 2, run.draw.width))


def _says_what_is_equal(run: Run) -> None:
    mlp = run.mlp()
    optimizer = sgd(mlp)
    compiled = run.sentinel.watch(run.compile(mlp), agree="hidden")
    for step in run.steps():
        y_BSD = run.advance(compiled, optimizer, run.data(step))
        run.sentinel.agree("tokens", y_BSD.argmax(-1), step=step)
        run.sentinel.agree("loss", y_BSD.square().mean(), step=step)
        run.sentinel.agree("schedule", {"step": step, "rate": 0.1 / (step + 1)}, every=2)


@program(sizes=(2, 4))
def values_that_are_equal(run: Run) -> None:
    """Outputs, tokens, the loss and Python numbers of every step are said to be equal on all ranks, and are."""
    _says_what_is_equal(run)


@program(sizes=(4,), dp=2)
def values_that_are_equal_in_a_group(run: Run) -> None:
    """The same in two tensor-parallel groups with different batches."""
    _says_what_is_equal(run)
