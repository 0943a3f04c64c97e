"""Every module that declares a fast path, and what a block calls for each by name."""

from tpcompile.fastpath.kernels import (
    activation,
    all_reduce_norm,
    few_rows,
    linear_gelu,
    qk_exchange,
    qk_head_norm,
    qk_norm,
    qkv_pack,
    token_norm,
)

__all__ = [
    "EARLY",
    "LAUNCHERS",
    "ROW_WORDS",
    "activation",
    "all_reduce_norm",
    "few_rows",
    "linear_gelu",
    "qk_exchange",
    "qk_head_norm",
    "qk_norm",
    "qkv_pack",
    "token_norm",
]

LAUNCHERS = {
    "qk_norm_rope": qk_norm.qk_norm_rope,
    "qkv_pack_rmsnorm_rope": qkv_pack.qkv_pack_rmsnorm_rope,
    "qk_head_norm_rope": qk_head_norm.qk_head_norm_rope,
    "add_rms_norm": token_norm.add_rms_norm,
    "add_modulated_norm": token_norm.add_modulated_norm,
    "gelu_tanh": activation.gelu_tanh,
    "silu_mul": activation.silu_mul,
    "linear_gelu_tanh": linear_gelu.linear_gelu_tanh,
    "few_rows_linear": few_rows.few_rows_linear,
    "few_rows_linear_gelu": few_rows.few_rows_linear_gelu,
    "qk_norm_rope_exchange": qk_exchange.qk_norm_rope_exchange,
    "all_reduce_add_rms_norm": all_reduce_norm.all_reduce_add_rms_norm,
}

EARLY = {
    "few_rows_linear": few_rows.few_rows_kernel,
    "few_rows_linear_gelu": few_rows.few_rows_kernel,
}
"""Kernels that wait for the kernel before them, and may start before it ends."""

ROW_WORDS = {
    "qk_norm_rope_exchange": lambda width, dtype, num_rows: 2,
    "all_reduce_add_rms_norm": all_reduce_norm.words_of,
}
"""Words that each rank sends for one of `num_rows` rows of `width` elements."""
