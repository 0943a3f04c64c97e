"""Every module that declares a fast path, and what a block calls for each by name."""

from tpcompile.fastpath.kernels import all_reduce_norm, qk_exchange, qk_head_norm, qk_norm, qkv_pack, token_norm

__all__ = ["LAUNCHERS", "all_reduce_norm", "qk_exchange", "qk_head_norm", "qk_norm", "qkv_pack", "token_norm"]

LAUNCHERS = {
    "qk_norm_rope": qk_norm.qk_norm_rope,
    "qk_head_norm_rope": qk_head_norm.qk_head_norm_rope,
    "add_rms_norm": token_norm.add_rms_norm,
    "add_modulated_norm": token_norm.add_modulated_norm,
}
