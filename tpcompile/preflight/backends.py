"""Settings of this process -> the backends that torch would select, as text: `auto` is resolved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpcompile.evidence.text import normalise
from tpcompile.torch_api import compiler as compat

Resolvers = Mapping[str, Any]
"""Name -> the resolved backend: text, a function or class, or a callable without arguments that returns it."""

_TYPICAL = [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128)]
"""(dtype, head size) that SDPA is asked for: it selects a backend by both."""
_HEADS, _TOKENS = 8, 128


def sdpa_backend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    """Backend that `scaled_dot_product_attention` selects for `q`, `k`, `v` [B, H, S, D], such as `FLASH_ATTENTION`.

    `options` are those of `scaled_dot_product_attention`: attn_mask, dropout_p, is_causal, scale, enable_gqa.
    Nothing is computed.
    """
    return compat.sdpa_choice(q, k, v, **options)


def resolved_backends(device: torch.device) -> dict[str, str]:
    """Attention, matmul, convolution and autotuning choices on this device, as `backend NAME` -> text."""
    backends = torch.backends
    flags = {
        "cpu capability": backends.cpu.get_cpu_capability(),
        "mkldnn": f"available={backends.mkldnn.is_available()} enabled={backends.mkldnn.enabled}",
        "mkl": str(backends.mkl.is_available()),
        "opt_einsum": f"enabled={backends.opt_einsum.enabled} strategy={backends.opt_einsum.strategy}",
        "cudnn": f"enabled={backends.cudnn.enabled} benchmark={backends.cudnn.benchmark} "
        f"deterministic={backends.cudnn.deterministic}",
        "blas": str(backends.cuda.preferred_blas_library()),
        "linalg": str(backends.cuda.preferred_linalg_library()),
        "deterministic warn_only": str(torch.is_deterministic_algorithms_warn_only_enabled()),
        "default device": torch.get_default_device().type,
        "grad mode": f"grad={torch.is_grad_enabled()} inference={torch.is_inference_mode_enabled()}",
    }
    facts = attention_choices(device) | flags | compat.autotune_settings()
    return {f"backend {name}": value for name, value in facts.items()}


def attention_choices(device: torch.device) -> dict[str, str]:
    """Backends that SDPA selects for typical self-attention, with and without a causal mask."""
    found = {}
    for dtype, head_dim in _TYPICAL:
        qkv = [torch.empty(1, _HEADS, _TOKENS, head_dim, dtype=dtype, device=device)] * 3
        for is_causal in (False, True):
            mask = " causal" if is_causal else ""
            dtype_name = str(dtype).removeprefix("torch.")
            ask = partial(sdpa_backend, *qkv, is_causal=is_causal)
            found[f"sdpa {dtype_name} head_dim {head_dim}{mask}"], _ = answer_of(ask)
    return found


def answers(resolvers: Resolvers) -> tuple[dict[str, str], dict[str, str]]:
    """The caller's own resolvers -> (`backend NAME` -> text, name -> error of those that raised)."""
    found, failed = {}, {}
    for name, resolver in resolvers.items():
        ask = resolver
        if not callable(resolver):
            ask = partial(str, resolver)
        key = f"backend {name}"
        found[key], is_answer = answer_of(ask)
        if not is_answer:
            failed[name] = found[key]
    return found, failed


def answer_of(ask: Callable[[], Any]) -> tuple[str, bool]:
    """(the resolved value as text without addresses, True), or (the error, False): a different rank may succeed."""
    try:
        value = ask()
    except Exception as error:  # a package that is missing on one rank is a difference to report
        return f"raised {type(error).__name__}: {normalise.objects(str(error))}".splitlines()[0], False
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}", True
    return normalise.device(normalise.objects(str(value))), True
