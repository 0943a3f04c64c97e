"""Faults in fused kernels: which one runs on shards, where it is called, what its ranks run.

Their modules need Triton, or declare a fast path for the whole process, so each is imported when its fault is used.
"""

from __future__ import annotations

from importlib import import_module

from torch import nn

from tpcompile.gate.faults.fault import FaultContext, injects

_ON_GPU = {
    "triton_kernel": ("triton_kernel:TritonKernel", "An undeclared Triton kernel in the graph."),
    "hidden_kernel": ("triton_kernel:HiddenKernel", "The same within a custom op."),
    "backward_kernel": ("triton_kernel:BackwardKernel", "The same in the backward only (needs --train)."),
    "third_party_kernel": (
        "triton_kernel:VendoredKernel", "The same in a function of an installed package, which is inlined.",
    ),
    "kernel_versions": ("triton_kernel:OtherVersion", "One rank has a different version of that package."),
    "kernel_grids": ("triton_kernel:KernelGrids", "The launch grid depends on the rank."),
    "edited_kernel": (
        "fast_path:call_edited_norm", "A certified fast path of the block whose kernel was edited since.",
    ),
    "single_gpu_kernel": (
        "fast_path:call_single_gpu_norm",
        "Attention calls `qkv_pack_rmsnorm_rope`, whose norm takes the shard for the full width.",
    ),
}  # fmt: skip
"""Fault -> what makes its program, in which module of this package, and what is broken."""
_ANYWHERE = {
    "single_gpu_fast_path": (
        "fast_path:SingleGpuFastPath", "A fast path that is not TP-aware, called on shards.",
    ),
    "fast_path_in_eager": ("fast_path:FastPathInEager", "The same where nothing is compiled: no graph has it."),
}  # fmt: skip


def _declare(name: str, home: str, what: str, *, needs_gpu: bool) -> None:
    def program(stack: nn.Module, context: FaultContext) -> nn.Module:
        module, _, maker = home.partition(":")
        made: nn.Module = getattr(import_module(f"tpcompile.gate.faults.{module}"), maker)(stack, context)
        return made

    program.__doc__ = what
    injects("program", name=name, needs_gpu=needs_gpu)(program)


for _name, _made_by in _ON_GPU.items():
    _declare(_name, *_made_by, needs_gpu=True)
for _name, _made_by in _ANYWHERE.items():
    _declare(_name, *_made_by, needs_gpu=False)
