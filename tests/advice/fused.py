"""Programs of two launches, and each with what `fusion show` says to try -> their launches, as JSON.

tests/fusion/test_no_gpu.py calls `main` in a process whose GPU computes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.fusion.zoo import doubled
from tpcompile.fusion.manifest_records import Role
from tpcompile.fusion.recorder import FusionRecorder
from tpcompile.fusion.why_not import missed_fusions
from tpcompile.torch_api.generated import generating_backend, without_caches
from tpcompile.torch_api.no_gpu import empty_tensors

SIDE = 64
_TEMPLATES = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "test_configs.max_mm_configs": 1}


@dataclass(frozen=True)
class Program:
    """A function of so many square matrices, and the settings of Inductor it is compiled with."""

    function: Callable[..., Any]
    num_inputs: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:32].sin(), x[32:].cos()


def _half_summed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:32].sum(-1), x[32:].cos()


def _scaled(x: Tensor, y: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return x * s[0, 0], y * s[0, 0]


def _three(x: Tensor) -> tuple[Tensor, ...]:
    return x.sin(), x.cos(), x.tan()


def _summed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.softmax(-1), x.softmax(0)


AGGRESSIVE = {"aggressive_fusion": True, "score_fusion_memory_threshold": 0}
PAIRS: dict[str, tuple[Program, ...]] = {
    "aggressive": (Program(_halves), Program(_halves, options=AGGRESSIVE)),
    "a reduction": (Program(_half_summed), Program(_half_summed, options=AGGRESSIVE)),
    "threshold": (Program(_scaled, 3), Program(_scaled, 3, {"score_fusion_memory_threshold": 0})),
    "size": (Program(_three, options={"max_fusion_size": 2}), Program(_three, options={"max_fusion_size": 64})),
    "a different order": (Program(_summed),),
    "custom op": (Program(lambda x: doubled(x.sin()).cos()), Program(lambda x: (x.sin() * 2).cos())),
    "two matmuls": (
        Program(lambda x, a, b: (x @ a, x @ b), 3),
        Program(lambda x, ab: x @ ab, 2),
    ),
    "template": (Program(lambda x, w: (x @ w).relu(), 2), Program(lambda x, w: (x @ w).relu(), 2, _TEMPLATES)),
    "before a matmul": (Program(lambda x, w: x.relu() @ w, 2), Program(lambda x, w: x.relu() @ w, 2, _TEMPLATES)),
}
"""Name -> the program, and what its remedy makes of it, where it has one."""


def recorded(program: Program) -> dict[str, Any]:
    """Names of the launches, and the pairs among them that are not one, the best first."""
    torch.compiler.reset()
    inputs = [torch.empty(SIDE, SIDE, device="cuda") for _ in range(program.num_inputs)]
    with torch._inductor.config.patch(program.options), without_caches(), FusionRecorder() as recorder:
        torch.compile(program.function, backend=generating_backend())(*inputs)
    manifest = recorder.manifest()
    (graph,) = manifest.graphs
    assert graph.is_aligned, graph.why_not_aligned
    missed = [one.model_dump(mode="json") for one in missed_fusions(graph, manifest.settings)]
    launches = [" ".join(one.ops) or one.name for one in graph.launches if one.role is not Role.WAIT]
    return {"launches": launches, "missed": missed}


def main() -> None:
    """Record all of them."""
    with empty_tensors(), torch.no_grad():
        rows = {name: [recorded(one) for one in pair] for name, pair in PAIRS.items()}
    print(json.dumps(rows))
