"""Programs in the forms in which fused kernels are published, that the ban was not written for; each is refused.

Triton kernels are traced, never run: the backend returns the input.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._triton
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import tpcompile
from tests.fastpath.banned import Program, captured
from tpcompile.fastpath import registry

PACKAGE = """
import functools

import torch
import triton
import triton.language as tl


@triton.jit
def inner_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * 2.0)


def checked(function):
    @functools.wraps(function)
    def call(x, *args):
        assert x.is_contiguous()
        return function(x, *args)
    return call


@checked
def fused(x):
    y = torch.empty_like(x)
    inner_kernel[lambda meta: (triton.cdiv(x.numel(), meta["SIZE"]),)](x, y, SIZE=4)
    return y


class FusedNorm(torch.nn.Module):
    def forward(self, x):
        return fused(x)
"""


@triton.jit
def rows_kernel(x_ptr, y_ptr, size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's arguments
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < size), mask=at < size)


@triton.jit
def gradient_kernel(x_ptr, y_ptr, size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's arguments
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < size) * 2, mask=at < size)


tuned_kernel = triton.autotune([triton.Config({"SIZE": size}) for size in (4, 8)], key=["size"])(rows_kernel)
shaped_kernel = triton.heuristics({"SIZE": lambda arguments: triton.next_power_of_2(arguments["size"])})(rows_kernel)


class LigerLike(torch.autograd.Function):
    """A kernel in each direction, launched by helpers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return rows(rows_kernel, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return rows(gradient_kernel, grad)


class GradientOnly(torch.autograd.Function):
    """Plain forward; the kernel is behind a function of the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return rows(gradient_kernel, grad * x)


def rows(kernel: Any, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    kernel[(1,)](x, y, x.numel(), SIZE=4)  # the helper's line
    return y


class Launcher:
    """Keeps a kernel and its grid, as wrappers of kernels do."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(self, x: Tensor, **constants: int) -> Tensor:
        y = torch.empty_like(x)
        self.kernel[(1,)](x, y, x.numel(), **constants)  # the wrapper's line
        return y


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.launcher = Launcher(rows_kernel)

    def forward(self, x: Tensor) -> Tensor:
        return self.launcher(x.sin(), SIZE=4)


@torch.library.custom_op("strangers::fused_norm", mutates_args=())
def fused_norm(x: Tensor) -> Tensor:
    return rows(rows_kernel, x)


@fused_norm.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("strangers::with_gradient", mutates_args=())
def with_gradient(x: Tensor) -> Tensor:
    return x.clone()


@with_gradient.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.triton_op("strangers::seen_through", mutates_args=())
def seen_through(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.library.wrap_triton(rows_kernel)[(1,)](x, y, x.numel(), SIZE=4)
    return y


with_gradient.register_autograd(lambda ctx, grad: rows(gradient_kernel, grad))

LIBRARY = torch.library.Library("_strangers_C", "DEF")
"""As an extension in C++ registers its ops: no Python function is behind them."""
LIBRARY.define("rms_norm(Tensor x, float eps) -> Tensor")
LIBRARY.define("rms_norm_(Tensor(a!) x, float eps) -> ()")
LIBRARY.impl("rms_norm", lambda x, eps: torch.empty_like(x), "CompositeExplicitAutograd")
LIBRARY.impl("rms_norm_", lambda x, eps: None, "CompositeExplicitAutograd")


def liger_like() -> Program:
    return lambda x: LigerLike.apply(x.sin())


def op_that_hides_a_launch() -> Program:
    return lambda x: fused_norm(x.sin())  # the user's line


def op_of_triton_kernels() -> Program:
    return lambda x: seen_through(x.sin())  # the user's line


def only_in_the_backward() -> Program:
    return lambda x: GradientOnly.apply(x)


def op_with_a_kernel_in_its_gradient() -> Program:
    return lambda x: with_gradient(x.sin())  # the user's line


def third_party_module() -> Program:
    module = importlib.import_module("stranger_norms").FusedNorm()
    return lambda x: module(x.sin())  # the user's line


def op_in_cpp() -> Program:
    return lambda x: torch.ops._strangers_C.rms_norm(x.sin(), 1e-6)  # the user's line


def op_in_cpp_that_writes_its_input() -> Program:
    def block(x: Tensor) -> Tensor:
        y = x.sin()
        torch.ops._strangers_C.rms_norm_(y, 1e-6)  # the user's line
        return y

    return block


def partial_of_a_launch() -> Program:
    def block(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        launch = partial(rows_kernel[(1,)], SIZE=4)
        launch(x, y, x.numel())  # the user's line
        return y

    return block


def partial_of_a_launcher() -> Program:
    launch = partial(rows, rows_kernel)
    return lambda x: launch(x.sin())


def method_of_a_module() -> Program:
    return Method()


def autotuned() -> Program:
    def block(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        tuned_kernel[(1,)](x, y, x.numel())  # the user's line
        return y

    return block


def heuristics() -> Program:
    def block(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        shaped_kernel[(1,)](x, y, x.numel())  # the user's line
        return y

    return block


PROGRAMS: dict[str, Callable[[], Program]] = {
    program.__name__: program
    for program in (
        liger_like,
        op_that_hides_a_launch,
        op_of_triton_kernels,
        only_in_the_backward,
        op_with_a_kernel_in_its_gradient,
        third_party_module,
        op_in_cpp,
        op_in_cpp_that_writes_its_input,
        partial_of_a_launch,
        partial_of_a_launcher,
        method_of_a_module,
        autotuned,
        heuristics,
    )
}


def verdicts(folder: str) -> dict[str, str]:
    """Name of each program -> this rank's verdict on it, and on a healthy one."""
    site_packages = Path(folder) / str(dist.get_rank()) / "site-packages"
    site_packages.mkdir(parents=True)
    (site_packages / "stranger_norms.py").write_text(PACKAGE)
    sys.path.insert(0, str(site_packages))
    torch.utils._triton.has_triton = lambda: True  # type: ignore[assignment]  # in a rank's process, which ends here
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = {}
    for name, program in {**PROGRAMS, "healthy": lambda: lambda x: x.sin()}.items():
        registry._REGISTERED.clear()
        found[name] = tpcompile.check(captured(program(), mesh), timeout_s=30).to_json()
    return found
