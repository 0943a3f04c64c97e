"""Settings of torch.backends that change what runs or its numbers -> text; seen on torch 2.11.0 and 2.13.0.

What a build or a GPU resolves by itself (`is_available`, versions, `preferred_blas_library`) is left out, since healthy
ranks may differ in it. TF32 is in `fp32_precision`, which follows `allow_tf32`; reading the latter may raise.
`tests/torch_api/test_flags.py` fails when one of the names moves.
"""

from __future__ import annotations

from operator import attrgetter

import torch

_FLAGS = (
    "cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic",
    "mkldnn.enabled", "mkldnn.deterministic",
    "cuda.matmul.allow_fp16_reduced_precision_reduction", "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "opt_einsum.enabled", "opt_einsum.strategy",
)  # fmt: skip
_FP32_PRECISION = (
    "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn",
)  # fmt: skip


def backend_flags() -> dict[str, str]:
    """Name of each setting -> its value in this process."""
    found = {name: str(attrgetter(name)(torch.backends)) for name in _FLAGS}
    # The setting that torch reads, backend by backend; "none" defers to the global setting.
    precisions = {name: attrgetter(f"{name}.fp32_precision")(torch.backends) for name in _FP32_PRECISION}
    precisions["all"] = torch.backends.fp32_precision
    cuda = torch.backends.cuda  # its switches of attention hold on a CPU too
    try:
        matmul_precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises once a backend has a setting of its own (`fp32_precision`)
        matmul_precision = "set per backend"
    return found | {
        "float32_matmul_precision": matmul_precision,
        "fp32_precision": " ".join(f"{name}={value}" for name, value in precisions.items()),
        "sdpa_enabled": f"flash={cuda.flash_sdp_enabled()} efficient={cuda.mem_efficient_sdp_enabled()} "
        f"cudnn={cuda.cudnn_sdp_enabled()} math={cuda.math_sdp_enabled()}",
        "sdpa_reduced_math": str(cuda.fp16_bf16_reduction_math_sdp_allowed()),
        "mha_fastpath": str(torch.backends.mha.get_fastpath_enabled()),
    }


num_function_modes = torch._C._len_torch_function_stack
"""How many modes would see an access to an attribute of a tensor (torch 2.11 to 2.13)."""
