"""Generated code for a GPU on a machine without one: torch 2.11.0 (built for CUDA) and 2.13.0 (built for the CPU).

    name                                          why
    device_interface, torch.cuda.*                properties of a GPU that is not there
    FakeTensorMode.avoid_device_init              tensors on it that hold nothing
    FakeGuardImpl, CUDAHooksInterface (C++)       autograd and ops in place on such tensors
    AsyncCompile.triton                           the source is kept, and not compiled
    joint_graph.lazy_init                         patterns are traced on the CPU
    Module._apply                                 `module.to(...)` of tensors that hold nothing
    torch.distributed.is_nccl_available           async TP asks for it, and the wheel for the CPU has none
    _ensureCUDADeviceGuardSet                     a guard for a GPU that is not there, and a thread for it

All but the last is for the whole process and stays: use a process of its own. `tests/torch_api/test_no_gpu.py` fails
when one of the names moves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

_OF_SM90 = {
    "name": "NVIDIA H100",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 85 << 30,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 50 << 20,
    "is_integrated": False,
    "is_multi_gpu_board": False,
}
_OF_SM80 = _OF_SM90 | {
    "name": "NVIDIA A100",
    "major": 8,
    "multi_processor_count": 108,
    "shared_memory_per_block_optin": 166912,
    "shared_memory_per_multiprocessor": 167936,
    "L2_cache_size": 40 << 20,
}
PROPERTIES = {"sm_90": _OF_SM90, "sm_80": _OF_SM80}
"""Architecture -> what `torch.cuda.get_device_properties` reports of it."""


def of_torch_cuda(arch: str) -> dict[str, Any]:
    """Names of `torch.cuda` -> what they are with one GPU of that architecture, which computes nothing."""
    gpu = SimpleNamespace(**PROPERTIES[arch])
    capability = (gpu.major, gpu.minor)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: gpu,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: gpu.name,
        "_lazy_init": lambda: None,
        "device": nullcontext,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
    }


def pretend(arch: str) -> None:
    """Make torch see one GPU of that architecture, which computes nothing, for the rest of this process."""
    import torch._subclasses.fake_tensor as fake_tensor
    import torch.backends.cuda as cuda_backends
    import torch.utils._triton as triton_utils
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.fx_passes import joint_graph

    gpu = SimpleNamespace(**PROPERTIES[arch])
    capability = (gpu.major, gpu.minor)
    cuda: Any = torch.cuda
    for name, value in of_torch_cuda(arch).items():
        setattr(cuda, name, value)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.distributed.is_nccl_available = lambda: True
    cuda.nccl.version = lambda: (0, 0, 0)
    internal: Any = torch._C
    internal._cuda_getCurrentRawStream = lambda index=0: 0
    triton_utils.triton_hash_with_backend = lambda: "no GPU"
    fake_tensor.init_gpu_context = lambda device=None: None
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    AsyncCompile.triton = lambda self, name, source, device_str="cuda": source  # type: ignore[assignment]
    lazy_init = joint_graph.lazy_init
    joint_graph.lazy_init = lambda input_device=None, **options: lazy_init(torch.device("cpu"), **options)
    torch.nn.Module._apply = _convert  # type: ignore[method-assign]
    # A build for CUDA asks the GPU which kernel of attention it has; one for the CPU takes the formula as well.
    for enable in (
        cuda_backends.enable_flash_sdp,
        cuda_backends.enable_mem_efficient_sdp,
        cuda_backends.enable_cudnn_sdp,
    ):
        enable(False)
    _register_interface(gpu, capability)
    _allocate_on_the_cpu()
    _choose_attention_once()


def _convert(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Stands for `Module._apply`, which exchanges the insides of parameters; those of empty tensors cannot be."""
    new: dict[int, Any] = {}  # one parameter in two modules stays one
    held: list[dict[str, Any]] = []
    for part in module.modules() if recurse else (module,):
        held += [part._parameters, part._buffers]
    for tensors in held:
        for name, tensor in list(tensors.items()):
            if tensor is None:
                continue
            if id(tensor) not in new:
                with torch.no_grad():
                    result = function(tensor)
                is_new_parameter = isinstance(tensor, torch.nn.Parameter) and result is not tensor
                new[id(tensor)] = torch.nn.Parameter(result, tensor.requires_grad) if is_new_parameter else result
            tensors[name] = new[id(tensor)]
    return module


def _register_interface(gpu: Any, capability: tuple[int, int]) -> None:
    from torch._dynamo import device_interface

    class NoGpu(device_interface.CudaInterface):
        """One GPU that computes nothing."""

        device = nullcontext  # type: ignore[assignment]

        class Worker:
            """What Inductor asks in a process that compiles."""

            set_device = staticmethod(lambda device: None)
            current_device = staticmethod(lambda: 0)
            get_device_properties = staticmethod(lambda device=None: gpu)

        current_device = staticmethod(lambda: 0)
        set_device = staticmethod(lambda device: None)
        device_count = staticmethod(lambda: 1)
        get_device_properties = staticmethod(lambda device=None: gpu)
        get_compute_capability = staticmethod(lambda device=None: 10 * capability[0] + capability[1])
        is_available = staticmethod(lambda: True)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)
        get_raw_stream = staticmethod(lambda index=0: 0)
        synchronize = staticmethod(lambda device=None: None)
        exchange_device = staticmethod(lambda index: 0)
        maybe_exchange_device = staticmethod(lambda index: 0)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)

    device_interface.get_interface_for_device("cuda")  # torch's own are registered with the first question
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, NoGpu)


_LIBRARIES: list[Any] = []
"""Keeps them alive: torch takes the kernels of a Library back when that is freed."""


def _allocate_on_the_cpu() -> None:
    """Constant folding makes small tensors on the node's device."""

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> Any:
        return torch.empty(size, dtype=dtype, device="cpu")

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Any:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "CUDA")
    library.impl("empty_strided", empty_strided, "CUDA")
    _LIBRARIES.append(library)


def _choose_attention_once() -> None:
    """The first attention of a process asks cuDNN for its version, which raises where there is none; torch 2.11."""
    with suppress(RuntimeError), empty_tensors():
        q_BHSd = torch.empty(1, 1, 8, 8, device="cuda")
        torch.nn.functional.scaled_dot_product_attention(q_BHSd, q_BHSd, q_BHSd)


def empty_tensors() -> Any:
    """Context in which tensors hold nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def without_guard() -> Any:
    """Context in which fake tensors set no guard for a GPU: a torch that is built for CUDA does.

    A backward pass starts a thread for the GPU of such a guard. A forked process does not have the thread, and torch
    refuses a backward pass in it.
    """
    return mock.patch.object(torch._C, "_ensureCUDADeviceGuardSet", lambda: None, create=True)
