"""Compile caches and settings of a rank: warm or cold, unwritable, stale, slow."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor import config as inductor_config

from tests.faults import backends
from tests.faults.case import fault, healthy
from tests.faults.context import Context
from tests.faults.planted.data import report
from tpcompile.evidence.records.causes import Cause
from tpcompile.preflight import InputCheck

# B batch, D features, b = B / ranks; all tensors are plain local ones.

_SPLIT = "karpathy/nanochat#722: one node has cached kernels, the other compiles"
_STAGGER = "unslothai/unsloth-zoo#967: cold-cache stagger, a read-only cache folder"

_LOCK_S = 60.0


def _layer(context: Context, *, backend: Any = "inductor") -> Callable[[Tensor], Tensor]:
    w_DD, group = context.randn(16, 16), context.group

    def layer(x_BD: Tensor) -> Tensor:  # blamed: the layer
        return funcol.all_reduce(x_BD @ w_DD, "sum", group)  # blamed: the layer

    return torch.compile(layer, backend=backend, dynamic=False)


def _own_cache(context: Context) -> Path:
    """A cache folder of this rank alone, as on nodes without a shared file system."""
    folder = context.run_dir / f"cache-of-rank-{context.rank}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


def _restart_with_split_cache(context: Context, layer: Callable[[Tensor], Tensor]) -> None:
    """Compile once on all ranks, then delete the cache of rank 1, as when a new node joins the job."""
    layer(context.randn(8, 16))
    torch.compiler.reset()
    if context.rank == 1:
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"])


@healthy(_SPLIT, _STAGGER)
def cache_split(context: Context) -> None:
    """Healthy: the cache hits on rank 0 and misses on rank 1."""
    _own_cache(context)
    layer = _layer(context)
    _restart_with_split_cache(context, layer)
    for _ in range(context.num_steps):
        layer(context.randn(8, 16))


class _ComparesGraphs(backends.CustomGraphPass):
    """A pass that compares the graphs of all ranks with a collective."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.is_first = True

    def __deepcopy__(self, memo: object) -> _ComparesGraphs:
        return self  # Inductor copies its settings, and a process group cannot be copied

    def __call__(self, graph: torch.fx.Graph) -> None:
        context = self._context
        sizes = torch.tensor([len(graph.nodes), -len(graph.nodes)], device=context.device)
        if context.diverges and not self.is_first:
            context.reached_fault()
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=context.group)  # fault: compile-time check
        assert sizes.sum() == 0, "the ranks compile different graphs"
        self.is_first = False

    def uuid(self) -> str:
        """Part of the cache key."""
        return "tpcompile-faults-compares-graphs"


@fault(
    Cause.STUCK_COLLECTIVE,
    "pytorch#193043: a compile-time sync hangs when the cache hits on some ranks",
    "xDiT#732: spmd_check hangs",
    marker="# fault: compile-time check",
    on_gpus=False,
)
def cache_split_check(context: Context) -> None:
    """A pass compares the graphs with a collective, and the cache hits on rank 0 only."""
    _own_cache(context)
    inductor_config.post_grad_custom_post_pass = _ComparesGraphs(context)
    layer = _layer(context)
    _restart_with_split_cache(context, layer)
    for _ in range(context.num_steps):
        layer(context.randn(8, 16))


@fault(Cause.COMPILE_FAILED, _STAGGER, marker="# blamed: the layer", step=3)
def cache_unwritable(context: Context) -> None:
    """The cache folder of rank 1 is lost at step 3 and cannot be written, when all ranks recompile."""
    folder = _own_cache(context)
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            shutil.rmtree(folder)
            folder.write_text("a file is where the folder was")
        layer(context.randn(8 if step < context.case.step else 4, 16))


@fault(
    Cause.RECOMPILE_LIMIT,
    "torchtitan#471: async TP silently off, cache limit reached",
    "allenai/OLMo-core#778: falls to eager",
    marker="# blamed: the layer",
    step=2,
)
def recompile_limit_setting(context: Context) -> None:
    """The recompile limit of rank 1 is 2: at the third shape it runs eager."""
    if context.diverges:
        torch._dynamo.config.recompile_limit = 2
    layer = _layer(context, backend=context.backend)
    for step in range(context.num_steps):
        context.faulty(step)
        _ = layer(context.randn(8 + step, 16)).sum().item()


class _Slow(backends.CustomGraphPass):
    """A pass that is slow on rank 1."""

    def __init__(self, context: Context) -> None:
        self._is_slow = context.rank == 1

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self._is_slow:
            time.sleep(6)

    def uuid(self) -> str:
        """Part of the cache key."""
        return "tpcompile-faults-slow"


@healthy(_SPLIT, "pytorch#108971: compiling takes 17 to 30 minutes on some ranks")
def slow_compiler(context: Context) -> None:
    """Healthy: Inductor takes 6 s longer on rank 1, twice."""
    _own_cache(context)
    inductor_config.post_grad_custom_post_pass = _Slow(context)
    layer = _layer(context)
    for step in range(context.num_steps):
        layer(context.randn(8 if step < 3 else 4, 16))


@fault(
    Cause.INPUT_VALUES,
    "pytorch#188332, pytorch#192042: a warm cache loads the code of a different rank",
    "vllm#13435, vllm#38962: a compile cache that is not keyed by rank",
)
def stale_artifact(context: Context) -> None:
    """Rank 1 loads code from a cache that addresses the shard of rank 0."""
    group = context.group

    def gathered(x_bD: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x_bD * 2, 0, group)

    compiled = torch.compile(gathered, backend=_caching(context), dynamic=False)
    inputs = InputCheck(timeout_s=30)
    for step in range(context.num_steps):
        y_BD = compiled(context.randn(4, 16) + context.rank)
        verdict = inputs.check(y_BD, step=step)
        if report(context, verdict):
            return


def _caching(context: Context) -> Callable[..., Any]:
    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        key = hashlib.sha256(module.print_readable(print_output=False).encode()).hexdigest()
        artifact = context.run_dir / f"artifact-{key}"
        if context.rank == 0:
            artifact.write_text("0")
        first_row = int(_loaded(artifact))
        if context.diverges:
            context.reached_fault()

        def code(x_bD: Tensor) -> tuple[Tensor]:
            y_BD = torch.empty(2 * x_bD.shape[0], *x_bD.shape[1:])
            here, there = (y_BD[:4], y_BD[4:]) if first_row == 0 else (y_BD[4:], y_BD[:4])
            parts = [torch.empty_like(x_bD) for _ in range(context.world_size)]
            dist.all_gather(parts, x_bD * 2, group=context.group)
            here.copy_(parts.pop(context.rank))
            there.copy_(parts.pop())
            return (y_BD,)

        return code

    return backend


def _loaded(path: Path) -> str:
    deadline = time.monotonic() + _LOCK_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.read_text()
