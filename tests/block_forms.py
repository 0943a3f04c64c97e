"""Name of a block form -> its `BlockConfig`, for the correctness matrix: every option of it, alone and together."""

from __future__ import annotations

from typing import Any

from tpcompile.config import BlockConfig

_WAN = {"style": "wan", "bias": True, "causal": False, "qk_norm": "full"}
_LLAMA = {"style": "llama", "bias": False, "causal": True, "qk_norm": "none", "grouped": 2}
_WAN_2_1 = _WAN | {
    "norm": "layer", "norm_affine": False, "rope": "interleaved", "modulation": True, "cross_attention": True,
}  # fmt: skip
_QWEN_3 = _LLAMA | {"qk_norm": "per_head", "wide_heads": True}
_SP = {"sequence_parallel": True}
FORMS: dict[str, dict[str, Any]] = {
    "wan": _WAN,
    "llama": _LLAMA,
    "llama full norm": _LLAMA | {"qk_norm": "full", "bias": True},
    "wan no norm": _WAN | {"qk_norm": "none"},
    "kv replicated": _LLAMA | {"num_kv_heads": 1, "qk_norm": "full", "bias": True},
    "kv replicated per head": _LLAMA | {"num_kv_heads": 1, "qk_norm": "per_head", "bias": True},
    "uneven": _WAN | {"uneven": "pad", "spare_heads": 1},
    "uneven grouped": _LLAMA | {"uneven": "pad", "spare_heads": 1, "qk_norm": "full", "bias": True},
    "cross-attention": _WAN | {"cross_attention": True},
    "wan 2.1": _WAN_2_1,
    "masked": _WAN | {"masked": True},
    "masked causal": _LLAMA | {"masked": True},
    "qwen 3": _QWEN_3,
    "sp wan": _WAN | _SP,
    "sp llama": _LLAMA | _SP,
    "sp wan 2.1": _WAN_2_1 | _SP,
    "sp masked": _WAN | _SP | {"masked": True},
    "sp kv replicated": _LLAMA | _SP | {"num_kv_heads": 1, "qk_norm": "full", "bias": True},
    "sp uneven": _WAN | _SP | {"uneven": "pad", "spare_heads": 1},
    "sp qwen 3": _QWEN_3 | _SP,
    "dropout": _WAN | {"dropout": 0.1},
    "sp dropout": _LLAMA | _SP | {"dropout": 0.1},
    "everything": _WAN_2_1 | _SP | {"masked": True, "num_kv_heads": 1, "dropout": 0.1},
}
BIG = "wan 2.1 14b"
"""A form of its own size, for GPUs."""
FORMS[BIG] = _WAN_2_1
SAMPLE = ("wan 2.1", "sp kv replicated")
SIZES: dict[str, dict[str, int]] = {
    "cpu": {"dim": 64, "num_heads": 8, "ffn_dim": 160, "batch": 2, "seq_len": 16, "num_layers": 1},
    "gpu": {"dim": 1024, "num_heads": 16, "ffn_dim": 2816, "batch": 2, "seq_len": 256, "num_layers": 1},
    "wan14b": {"dim": 5120, "num_heads": 40, "ffn_dim": 13824, "batch": 1, "seq_len": 1024, "num_layers": 1},
}


def forms_of(size: str) -> list[str]:
    """Forms that are run in a size by default."""
    return [form for form in FORMS if form != BIG or size != "cpu"]


def form_config(form: str, size: str) -> BlockConfig:
    """The form in a size, in float32."""
    sizes = dict(SIZES["wan14b" if form == BIG else size])
    options = dict(FORMS[form])
    grouped = options.pop("grouped", 1)
    wide = options.pop("wide_heads", False)
    head_size = sizes["dim"] // sizes["num_heads"]
    spare = options.pop("spare_heads", 0)
    sizes["num_heads"] += spare * grouped
    if wide or spare:
        options["head_size"] = 2 * head_size if wide else head_size
    if spare:
        sizes["ffn_dim"] -= 6  # neither heads nor hidden features come out even
    if options.get("cross_attention"):
        options["context_len"] = sizes["seq_len"] // 2 + 1
    options.setdefault("num_kv_heads", sizes["num_heads"] // grouped)
    return BlockConfig.model_validate(sizes | {"eps": 1e-6, "dtype": "float32"} | options)
