"""Environment variables that change compilation or communication -> findings."""

from __future__ import annotations

from collections.abc import Mapping

from tpcompile.doctor.finding import Finding, warn

_BEGIN = (
    "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_LOGS", "TORCH_TRACE", "TORCH_NCCL_", "TORCH_DISTRIBUTED",
    "AOT_", "TRITON_", "NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
_OFF = ("", "0")
_RISKY = {
    "TORCH_COMPILE_DISABLE": ("nothing is compiled", "unset it"),
    "TORCHDYNAMO_DISABLE": ("nothing is compiled", "unset it"),
    "TORCHDYNAMO_SUPPRESS_ERRORS": ("what does not compile runs eager, perhaps on one rank only", "unset it"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": ("every process compiles anew", "unset it where the start takes too long"),
    "CUDA_LAUNCH_BLOCKING": ("kernels wait for one another", "unset it, except to find an error"),
    "TORCHINDUCTOR_MAX_AUTOTUNE": ("ranks time kernels and may choose different ones", "share one cache, or unset it"),
}
"""Variable -> (what it does where it is on, what to do)."""


def variables(environ: Mapping[str, str]) -> list[Finding]:
    """One finding for each variable that is set and risky, and one that lists the others."""
    risky: list[Finding] = []
    others: list[str] = []
    for name in sorted(environ):
        value = environ[name]
        if name in _RISKY and value not in _OFF:
            effect, todo = _RISKY[name]
            risky.append(warn("environment", f"{name}={value}: {effect}", todo))
        elif name.startswith(_BEGIN):
            others.append(f"{name}={value}")
    listed = Finding(name="environment", says=" ".join(others) or "nothing set that changes compilation")
    return [listed, *risky]
