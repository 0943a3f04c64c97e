"""Programs that call fused kernels which no rank may run on a shard, captured on this rank and checked with the others.

Triton kernels are traced, never run: the backend returns the input.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._triton
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tpcompile
from tests.fastpath import kernels
from tpcompile.checking import Capture
from tpcompile.evidence.records import Verdict
from tpcompile.fastpath import fast_path, registry

Program = Callable[[Tensor], Tensor]
NUM_BLOCKS = (24, 28)
THIRD_PARTY = """
import torch
import triton
import triton.language as tl


@triton.jit
def vendored_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * 2.0)


def vendored(x):
    y = torch.empty_like(x)
    vendored_kernel[(1,)](x, y, SIZE=4)
    return y
"""


@torch.library.custom_op("tpcompile_tests::conceals", mutates_args=())
def conceals(x: Tensor) -> Tensor:
    return kernels.launch(x)


@conceals.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class BackwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y = torch.empty_like(grad)
        kernels.norm_kernel[(1,)](grad, y, grad.numel(), SIZE=4)  # only here
        return y


def single_gpu() -> Program:
    launch = fast_path("norm", replaces=kernels.plain)(kernels.launch)
    return lambda x: launch(x.sin())  # the user's line


def unregistered() -> Program:
    def block(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        kernels.norm_kernel[(1,)](x, y, x.numel(), SIZE=4)  # the user's line
        return y

    return block


def hidden() -> Program:
    return lambda x: conceals(x.sin())  # the user's line


def backward_only() -> Program:
    return lambda x: BackwardOnly.apply(x)


def third_party() -> Program:
    vendored = importlib.import_module("vendored").vendored
    return lambda x: vendored(x.sin())  # the user's line


def grids() -> Program:
    num_blocks = NUM_BLOCKS[dist.get_rank()]
    folded = torch._dynamo.assume_constant_result(lambda: num_blocks)  # torch asks no guard
    return lambda x: kernels.launch_in_grid(x, (folded(),))


def shared() -> Program:
    """Two launchers of one kernel, of which only one is right on a shard."""
    fast_path("right", replaces=kernels.plain, tp="pointwise")(kernels.launch)
    wrong = fast_path("wrong", replaces=kernels.plain)(kernels.launch_in_grid)
    return lambda x: kernels.launch(x) + wrong(x, (1,))  # the user's line


PROGRAMS: dict[str, Callable[[], Program]] = {
    program.__name__: program
    for program in (single_gpu, unregistered, hidden, backward_only, third_party, grids, shared)
}


def verdicts(folder: str) -> dict[str, str]:
    """Name of each program -> this rank's verdict on it."""
    place_third_party(Path(folder))
    torch.utils._triton.has_triton = lambda: True  # type: ignore[assignment]  # in a rank's process, which ends here
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = {}
    for name, program in PROGRAMS.items():
        registry._REGISTERED.clear()
        found[name] = tpcompile.check(captured(program(), mesh), timeout_s=30).to_json()
    return found


def place_third_party(folder: Path) -> None:
    """Make `vendored` importable, from site-packages of this rank's own; rank 1 has a different version."""
    rank = dist.get_rank()
    site_packages = folder / str(rank) / "site-packages"
    site_packages.mkdir(parents=True)
    (site_packages / "vendored.py").write_text(THIRD_PARTY.replace("2.0", f"{2 + rank}.0"))
    sys.path.insert(0, str(site_packages))


def captured(program: Program, mesh: DeviceMesh) -> Capture:
    """Compile and call it once."""
    torch.compiler.reset()
    x = torch.ones(4, requires_grad=True)
    with tpcompile.capture(mesh, watch=False, tp_aware=["traced_only"]) as run:
        torch.compile(program, backend=traced_only)(x)
    return run


def traced_only(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., tuple[Tensor]]:
    """A backend that runs nothing: the last input is the result."""
    return lambda *args: (inputs[-1],)


def parsed(results: list[dict[str, str]]) -> dict[str, list[Verdict]]:
    """Verdicts by program, one for each rank."""
    return {name: [Verdict.model_validate_json(rank[name]) for rank in results] for name in results[0]}
