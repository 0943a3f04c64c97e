"""Switches each setting of torch.backends and prints, as JSON, which facts of the environment layer that changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from torch import backends

from tpcompile.torch_api import compiler as compat

cudnn, mkldnn, matmul, cuda = backends.cudnn, backends.mkldnn, backends.cuda.matmul, backends.cuda
SWITCHES: dict[str, Callable[[bool], object]] = {
    "cudnn.enabled": partial(setattr, cudnn, "enabled"),
    "cudnn.benchmark": partial(setattr, cudnn, "benchmark"),
    "cudnn.deterministic": partial(setattr, cudnn, "deterministic"),
    "cudnn.allow_tf32": partial(setattr, cudnn, "allow_tf32"),
    "mkldnn.enabled": partial(setattr, mkldnn, "enabled"),
    "mkldnn.deterministic": partial(setattr, mkldnn, "deterministic"),
    "fp16 reduction": partial(setattr, matmul, "allow_fp16_reduced_precision_reduction"),
    "bf16 reduction": partial(setattr, matmul, "allow_bf16_reduced_precision_reduction"),
    "fp16 accumulation": partial(setattr, matmul, "allow_fp16_accumulation"),
    "matmul.allow_tf32": partial(setattr, matmul, "allow_tf32"),
    "flash attention": cuda.enable_flash_sdp,
    "efficient attention": cuda.enable_mem_efficient_sdp,
    "attention by maths": cuda.enable_math_sdp,
    "attention of cudnn": cuda.enable_cudnn_sdp,
    "reduced attention": cuda.allow_fp16_bf16_reduction_math_sdp,
    "mha fast path": backends.mha.set_fastpath_enabled,
    "mkldnn precision": lambda is_on: setattr(mkldnn, "fp32_precision", "ieee" if is_on else "none"),
    "mkldnn rnn precision": lambda is_on: setattr(mkldnn.rnn, "fp32_precision", "ieee" if is_on else "none"),
    "all precisions": lambda is_on: setattr(backends, "fp32_precision", "ieee" if is_on else "none"),
}


def changed_by(switch: Callable[[bool], object]) -> list[str]:
    """Facts that are not the same on and off."""
    facts = []
    for is_on in (True, False):
        switch(is_on)
        facts.append(compat.environment())
    on, off = facts
    return sorted(name for name in on.keys() | off.keys() if on.get(name) != off.get(name))


print(json.dumps({name: changed_by(switch) for name, switch in SWITCHES.items()}))
