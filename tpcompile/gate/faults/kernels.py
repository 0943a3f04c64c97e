"""Faults in fused kernels: which one runs on shards, where it is called, what its ranks run."""

from __future__ import annotations

from torch import nn

from tpcompile.gate.faults.fault import FaultContext, injects


@injects("program", needs_gpu=True)
def triton_kernel(stack: nn.Module, context: FaultContext) -> nn.Module:
    """An undeclared Triton kernel in the graph."""
    from tpcompile.gate.faults.triton_kernel import TritonKernel

    return TritonKernel(stack, context)


@injects("program", needs_gpu=True)
def hidden_kernel(stack: nn.Module, context: FaultContext) -> nn.Module:
    """The same within a custom op."""
    from tpcompile.gate.faults.triton_kernel import HiddenKernel

    return HiddenKernel(stack, context)


@injects("program", needs_gpu=True)
def backward_kernel(stack: nn.Module, context: FaultContext) -> nn.Module:
    """The same in the backward only (needs --train)."""
    from tpcompile.gate.faults.triton_kernel import BackwardKernel

    return BackwardKernel(stack, context)


@injects("program", needs_gpu=True)
def third_party_kernel(stack: nn.Module, context: FaultContext) -> nn.Module:
    """The same in a function of an installed package, which is inlined."""
    from tpcompile.gate.faults.triton_kernel import VendoredKernel

    return VendoredKernel(stack, context)


@injects("program", needs_gpu=True)
def kernel_versions(stack: nn.Module, context: FaultContext) -> nn.Module:
    """One rank has a different version of that package."""
    from tpcompile.gate.faults.triton_kernel import VendoredKernel

    return VendoredKernel(stack, context, factor="1.0 + 0.0" if context.is_target else "1.0")


@injects("program", needs_gpu=True)
def kernel_grids(stack: nn.Module, context: FaultContext) -> nn.Module:
    """The launch grid depends on the rank."""
    from tpcompile.gate.faults.triton_kernel import KernelGrids

    return KernelGrids(stack, context)


@injects("program", needs_gpu=True)
def edited_kernel(stack: nn.Module, context: FaultContext) -> nn.Module:
    """A certified fast path of the block whose kernel was edited since."""
    from tpcompile.gate.faults.fast_path import call_edited_norm

    return call_edited_norm(stack)


@injects("program", needs_gpu=True)
def single_gpu_kernel(stack: nn.Module, context: FaultContext) -> nn.Module:
    """Attention calls `qkv_pack_rmsnorm_rope`, whose norm takes the shard for the full width."""
    from tpcompile.gate.faults.fast_path import call_single_gpu_norm

    return call_single_gpu_norm(stack)


@injects("program")
def single_gpu_fast_path(stack: nn.Module, context: FaultContext) -> nn.Module:
    """A fast path that is not TP-aware, called on shards."""
    from tpcompile.gate.faults.fast_path import SingleGpuFastPath

    return SingleGpuFastPath(stack, context)


@injects("program")
def fast_path_in_eager(stack: nn.Module, context: FaultContext) -> nn.Module:
    """The same where nothing is compiled: no graph has it."""
    from tpcompile.gate.faults.fast_path import FastPathInEager

    return FastPathInEager(stack, context)
